// Which files have descriptors now. A process may have only so many at once, so those of a file that can be
// opened again by its name are closed while nothing needs them.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "error.h"
#include "unique_fd.h"

namespace swapper {

// What a use asks of descriptors.
struct Need {
    bool writes = false;
    bool buffered = false;  // else it takes any
};

// Of one open file. Whoever holds them, as a request does until it is over, keeps them open.
struct Descriptors {
    UniqueFd buffered;     // not valid where nobody has needed it since the file was closed, and it is direct
    UniqueFd direct;       // with O_DIRECT; not valid where the file is not direct
    bool writable = true;  // false: the file may only be read by now, though it was opened for writing

    int any() const { return buffered.valid() ? buffered.get() : direct.get(); }
    size_t count() const { return (buffered.valid() ? 1U : 0U) + (direct.valid() ? 1U : 0U); }
    bool will_do(Need need) const {
        return (writable || !need.writes) && (buffered.valid() || !need.buffered);
    }
};

// open(2), again after EINTR; where the process or the system has no descriptor left, again after closing one
// that nobody needs.
int open_with_room(const std::string& path, int flags);

// A file that is opened again by its name. Every method may be called from any thread.
//
// [Note: closed files] The name is that which the file had when it was opened, without symbolic links, so
// neither a link that is changed nor another working directory leads elsewhere. It is opened only if device,
// inode and time of birth are those of the file that was open: the inode alone is given to the next file as
// soon as the former is gone. Where one of them cannot be relied upon, on network and FUSE file systems, or
// the name did not lead to the file when it was to be closed, the file stays open.
class ClosableFile {
  public:
    // `flags`: the access mode. Null where the file has to stay open.
    static std::shared_ptr<ClosableFile> of(std::string path, int flags,
                                            std::shared_ptr<const Descriptors> open);

    // Null if there are none that will do: makes no system call.
    std::shared_ptr<const Descriptors> opened(Need need);
    // Opens what is needed. Throws IoError: ESTALE where another file has the name.
    std::shared_ptr<const Descriptors> descriptors(Need need);
    // Of the file, without opening it. Throws as `descriptors`.
    struct stat status();
    // They stay open from now on. Throws as `descriptors`.
    std::shared_ptr<const Descriptors> keep_open();
    // The page cache may have what the drive has not: the kernel must be asked before they are closed, as it
    // tells of a write that it lost only those who had the file open. To be called before the write.
    void note_buffered_write() { unsynced_.store(true, std::memory_order_relaxed); }
    // The error that was found when they were closed, once.
    std::optional<IoError> take_lost();
    // The file is closed by its owner.
    void end();

    bool is_at_or_beneath(const std::string& path) const;

  private:
    friend class OpenFiles;
    struct Identity {
        uint32_t device_major, device_minor;
        uint64_t inode;
        int64_t born_s;
        uint32_t born_ns;
        bool operator==(const Identity& other) const {
            return device_major == other.device_major && device_minor == other.device_minor &&
                   inode == other.inode && born_s == other.born_s && born_ns == other.born_ns;
        }
    };
    enum class Place : uint8_t { kOpen, kClosed, kKept, kEnded };

    static int identify(int directory, const char* path, int flags, Identity& identity);
    void check_name() const;
    std::shared_ptr<const Descriptors> open_again(Need need) const;
    IoError refusal(int error) const;

    std::string path_;  // as given, for errors
    std::string name_;  // absolute
    Identity identity_{};
    int flags_ = 0;
    bool direct_ = false;
    std::atomic<bool> unsynced_{false};

    // Under the mutex of `OpenFiles`.
    std::shared_ptr<const Descriptors> open_;
    Place place_ = Place::kEnded;
    bool leaving_ = false;  // a thread is about to close it
    std::optional<IoError> lost_;
    std::vector<std::shared_ptr<const Descriptors>> superseded_;  // kept open, and others are used since
    std::list<std::shared_ptr<ClosableFile>>::iterator at_;
};

// All closable files of the process. Never destroyed: threads may outlive `main`.
class OpenFiles {
  public:
    static OpenFiles& get();

    // Closes what was used least recently, until no more than a quarter of the descriptors that the process
    // may have are open. What is in use stays.
    void make_room();
    // Closes one file that nobody needs. False if there is none.
    bool close_one();
    // Have files stay open that are at `path` or beneath, before they lose their names. Throws IoError.
    void keep_open(const std::string& path);

    // Whether there will be room when something is over.
    bool in_use();
    size_t open_descriptors();  // of files that may be closed

  private:
    friend class ClosableFile;
    using Files = std::list<std::shared_ptr<ClosableFile>>;

    OpenFiles();
    bool close_one_above(size_t limit);
    void move(ClosableFile& file, ClosableFile::Place place);  // under the mutex

    // For a few instructions, none of them a system call. A fork waits for it, so a child finds it free.
    std::mutex mutex_;
    Files open_;    // the most recently used first
    Files others_;  // closed, or kept open
    size_t count_ = 0;
};

}  // namespace swapper
