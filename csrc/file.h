// An open file, with and without O_DIRECT.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "unique_fd.h"

namespace swapper {

enum class Access { kRead, kWrite, kReadWrite };

struct OpenOptions {
    Access access = Access::kRead;
    bool create = false;     // made with mode 0600 where it does not exist
    bool truncate = false;   // emptied
    bool exclusive = false;  // with `create`: an error where it exists
    bool direct = true;      // false: never use O_DIRECT
};

// Keeps two descriptors: a buffered one, and one with O_DIRECT where the file system gives it. Both close on
// exec and when the object dies; transfers share ownership, so a file outlives what is in flight on it.
// Every method may be called from any thread: all that changes after construction is `direct`, once, to
// false.
class File {
  public:
    // Throws IoError.
    File(std::string path, const OpenOptions& options);

    const std::string& path() const { return path_; }
    bool direct() const { return direct_.valid() && !given_up_.load(std::memory_order_relaxed); }
    // Why `direct()` is false; empty where it is true.
    std::string direct_refusal() const;
    // The direct descriptor answered EINVAL to a request that the buffered one then took: it is used no more.
    void give_up_direct() const { given_up_.store(true, std::memory_order_relaxed); }
    int direct_fd() const { return direct_.get(); }
    int buffered_fd() const { return buffered_.get(); }

    // What O_DIRECT asks of the memory address; 1 where the file is not direct.
    uint64_t memory_alignment() const { return memory_alignment_; }
    // Offsets and lengths that are multiples of this go direct in whole; 1 where the file is not direct.
    // [Note: page cut] Never less than a page, although the device may allow 512 bytes: an unaligned edge
    // goes through the page cache, whose unit is the page. Were part of that page written directly, the
    // kernel could write the cached page back later, with the old bytes in the part that went direct.
    uint64_t offset_alignment() const { return offset_alignment_; }

    uint64_t size() const;
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
    void open_direct(int flags);

    std::string path_;
    UniqueFd buffered_;
    UniqueFd direct_;
    std::string direct_refusal_;
    uint64_t memory_alignment_ = 1;
    uint64_t offset_alignment_ = 1;
    mutable std::atomic<bool> given_up_{false};
};

// Lets two names of one file system change places in one step, whatever they name. Throws IoError.
void exchange(const std::string& first, const std::string& second);

}  // namespace swapper
