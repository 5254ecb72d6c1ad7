// An open file, with and without O_DIRECT.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "open_files.h"

namespace swapper {

enum class Access { kRead, kWrite, kReadWrite };

struct OpenOptions {
    Access access = Access::kRead;
    bool create = false;     // made with mode 0600 where it does not exist
    bool truncate = false;   // emptied
    bool exclusive = false;  // with `create`: an error where it exists
    bool direct = true;      // false: never use O_DIRECT
    bool by_name = false;    // its name stays: it may be closed while it is not used, and opened again by it
};

// Has two descriptors: a buffered one, and one with O_DIRECT where the file system gives it. Both close on
// exec and when the object dies; transfers share ownership, so a file outlives what is in flight on it. With
// `by_name` they may close before, while nobody holds `descriptors`, and every method but those about
// alignment may open them again: see [Note: closed files]. Every method may be called from any thread.
class File : public std::enable_shared_from_this<File> {
  public:
    // Throws IoError.
    File(std::string path, const OpenOptions& options);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Open for as long as they are held. Throws IoError.
    std::shared_ptr<const Descriptors> descriptors(Need need = {}) const;
    // The same; but where the process has no descriptor left, and transfers will give some back, it waits for
    // about 2 s. Not for I/O threads.
    std::shared_ptr<const Descriptors> await_descriptors(Need need = {}) const;
    // Those that are open now; null if there are none that will do. Makes no system call.
    std::shared_ptr<const Descriptors> opened(Need need = {}) const;
    // The buffered descriptor, which stays open as long as the object. Throws IoError.
    int fileno() const;
    // To be called before a write goes through the page cache.
    void note_buffered_write() const;
    // Whether one ever did, so that `check_written` has something to ask.
    bool wrote_buffered() const { return wrote_buffered_.load(std::memory_order_relaxed); }
    // The file is about to lose its name: what transfers have still to do with it goes on. Throws IoError.
    void leave_name() const;

    const std::string& path() const { return path_; }
    bool direct() const { return has_direct_ && !given_up_.load(std::memory_order_relaxed); }
    // Why `direct()` is false; empty where it is true.
    std::string direct_refusal() const;
    // The direct descriptor answered EINVAL to a request that the buffered one then took: it is used no more.
    void give_up_direct() const { given_up_.store(true, std::memory_order_relaxed); }

    // What O_DIRECT asks of the memory address; 1 where the file is not direct.
    uint64_t memory_alignment() const { return memory_alignment_; }
    // Offsets and lengths that are multiples of this go direct in whole; 1 where the file is not direct.
    // [Note: page cut] Never less than a page, although the device may allow 512 bytes: an unaligned edge
    // goes through the page cache, whose unit is the page. Were part of that page written directly, the
    // kernel could write the cached page back later, with the old bytes in the part that went direct.
    uint64_t offset_alignment() const { return offset_alignment_; }

    struct stat status() const;
    uint64_t size() const { return static_cast<uint64_t>(status().st_size); }
    // Reserves blocks and extends the size to at least `length`. False where the file system cannot.
    bool preallocate(uint64_t length) const;
    void truncate(uint64_t length) const;
    // Throws if the kernel could not write what an earlier write left in the page cache: it then has dropped
    // the bytes. Waits for what it is writing now, and makes it write nothing. The kernel says so once per
    // descriptor.
    void check_written() const;
    // fdatasync: data, and what is needed to find it.
    void sync() const;

  private:
    void open_direct(int flags, Descriptors& open);

    std::string path_;
    std::shared_ptr<const Descriptors> fixed_;  // null if `closable_` has them
    std::shared_ptr<ClosableFile> closable_;    // null if they stay open
    bool has_direct_ = false;
    bool may_write_ = false;
    std::string direct_refusal_;
    uint64_t memory_alignment_ = 1;
    uint64_t offset_alignment_ = 1;
    mutable std::atomic<bool> given_up_{false};
    mutable std::atomic<bool> wrote_buffered_{false};
};

// Lets two names of one file system change places in one step, whatever they name. Throws IoError.
void exchange(const std::string& first, const std::string& second);

}  // namespace swapper
