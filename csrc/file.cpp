#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include "error.h"

namespace swapper {
namespace {

// struct statx of Linux 6.1, spelled out so that the build does not depend on the age of the headers.
struct StatxWithDio {
    uint32_t mask;
    uint32_t ignored[37];  // up to and including stx_dev_minor, and stx_mnt_id
    uint32_t dio_memory_alignment;
    uint32_t dio_offset_alignment;
    uint64_t spare[12];
};
static_assert(offsetof(StatxWithDio, dio_memory_alignment) == 0x98, "layout of struct statx");
static_assert(sizeof(StatxWithDio) == 256, "layout of struct statx");
constexpr unsigned kStatxDioAlign = 0x2000;

// Logical block size of the device that holds the file, for kernels before 6.1; 4096 where unknown.
uint32_t logical_block_bytes(int fd) {
    struct stat info{};
    if (::fstat(fd, &info) != 0) return 4096;
    const std::string device =
        "/sys/dev/block/" + std::to_string(major(info.st_dev)) + ":" + std::to_string(minor(info.st_dev));
    // A partition has no queue of its own: that of its disk is one directory up.
    for (const char* queue : {"/queue/", "/../queue/"}) {
        std::ifstream text(device + queue + "logical_block_size");
        uint32_t bytes = 0;
        if (text >> bytes && bytes >= 512) return bytes;
    }
    return 4096;
}

}  // namespace

File::File(std::string path, const OpenOptions& options) : path_(std::move(path)) {
    int flags = 0;
    switch (options.access) {
        case Access::kRead:
            flags |= O_RDONLY;
            break;
        case Access::kWrite:
            flags |= O_WRONLY;
            break;
        case Access::kReadWrite:
            flags |= O_RDWR;
            break;
    }
    const int access_flags = flags;
    if (options.create) flags |= O_CREAT;
    if (options.truncate) flags |= O_TRUNC;
    if (options.exclusive) flags |= O_EXCL;
    struct stat info{};
    if (::stat(path_.c_str(), &info) == 0 && S_ISFIFO(info.st_mode)) {
        throw IoError(ESPIPE, "open", path_);  // to open it could wait for ever
    }
    may_write_ = options.access != Access::kRead;
    auto open = std::make_shared<Descriptors>();
    open->buffered = UniqueFd(open_with_room(path_, flags));
    if (!open->buffered.valid()) throw IoError(errno, "open", path_);
    if (::fstat(open->buffered.get(), &info) != 0) throw IoError(errno, "open", path_);
    if (S_ISDIR(info.st_mode)) throw IoError(EISDIR, "open", path_);
    if (options.direct) {
        open_direct(access_flags, *open);
    } else {
        direct_refusal_ = "opened with direct=False";
    }
    has_direct_ = open->direct.valid();
    if (options.by_name) closable_ = ClosableFile::of(path_, access_flags, open);
    if (closable_ == nullptr) fixed_ = std::move(open);
}

File::~File() {
    if (closable_ != nullptr) closable_->end();
}

std::shared_ptr<const Descriptors> File::descriptors(Need need) const {
    need.writes = need.writes && may_write_;
    return closable_ != nullptr ? closable_->descriptors(need) : fixed_;
}

std::shared_ptr<const Descriptors> File::await_descriptors(Need need) const {
    for (int tries = 0;; ++tries) {
        try {
            return descriptors(need);
        } catch (const IoError& error) {
            const bool wanting = error.code == EMFILE || error.code == ENFILE;
            if (!wanting || tries == 200 || !OpenFiles::get().in_use()) throw;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
}

std::shared_ptr<const Descriptors> File::opened(Need need) const {
    need.writes = need.writes && may_write_;
    return closable_ != nullptr ? closable_->opened(need) : fixed_;
}

int File::fileno() const {
    return (closable_ != nullptr ? closable_->keep_open() : fixed_)->buffered.get();
}

void File::note_buffered_write() const {
    wrote_buffered_.store(true, std::memory_order_relaxed);
    if (closable_ != nullptr) closable_->note_buffered_write();
}

void File::leave_name() const {
    // Whoever calls this has one.
    if (closable_ != nullptr && weak_from_this().use_count() > 1) closable_->keep_open();
}

void File::open_direct(int flags, Descriptors& open) {
    // Through /proc, so that it is the same file even if the name was moved meanwhile.
    const std::string same_file = "/proc/self/fd/" + std::to_string(open.buffered.get());
    UniqueFd fd(open_with_room(same_file, flags | O_DIRECT));
    if (!fd.valid() && errno == ENOENT) fd = UniqueFd(open_with_room(path_, flags | O_DIRECT));
    if (!fd.valid()) {
        // What is short now says nothing about the file, which would be slow for as long as it is open.
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) throw IoError(errno, "open", path_);
        // EINVAL is the answer of a file system without O_DIRECT; anything else is as good a reason.
        direct_refusal_ = std::string("open with O_DIRECT: ") + std::strerror(errno);
        return;
    }
    struct stat buffered{};
    struct stat direct{};
    if (::fstat(open.buffered.get(), &buffered) != 0 || ::fstat(fd.get(), &direct) != 0 ||
        buffered.st_dev != direct.st_dev || buffered.st_ino != direct.st_ino) {
        direct_refusal_ = "the file was replaced while it was opened";
        return;
    }
    uint64_t memory = 0;
    uint64_t offset = 0;
    StatxWithDio info{};
#ifdef SYS_statx
    const long rc = ::syscall(SYS_statx, fd.get(), "", AT_EMPTY_PATH, kStatxDioAlign, &info);
#else
    const long rc = -1;
#endif
    if (rc == 0 && (info.mask & kStatxDioAlign) != 0) {
        memory = info.dio_memory_alignment;
        offset = info.dio_offset_alignment;
        if (memory == 0 || offset == 0) {
            direct_refusal_ = "the file system says that this file does not support O_DIRECT";
            return;
        }
    } else {
        memory = offset = logical_block_bytes(fd.get());
    }
    open.direct = std::move(fd);
    memory_alignment_ = memory;
    offset_alignment_ = std::max(offset, static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)));
    // Only edges of a page go through the buffered descriptor: read-ahead would bring neighbours into the
    // page cache that are being written directly. See [Note: page cut]. Advice, so its result is ignored.
    (void)::posix_fadvise(open.buffered.get(), 0, 0, POSIX_FADV_RANDOM);
}

std::string File::direct_refusal() const {
    if (!given_up_.load(std::memory_order_relaxed)) return direct_refusal_;
    return std::string("a direct transfer was refused: ") + std::strerror(EINVAL);
}

struct stat File::status() const {
    if (closable_ != nullptr) return closable_->status();
    struct stat info{};
    if (::fstat(fixed_->buffered.get(), &info) != 0) throw IoError(errno, "stat", path_);
    return info;
}

bool File::preallocate(uint64_t length) const {
    if (length == 0) return true;
    const std::shared_ptr<const Descriptors> open = await_descriptors({true, false});
    int rc;
    do {
        rc = ::fallocate(open->any(), 0, 0, static_cast<off_t>(length));
    } while (rc != 0 && errno == EINTR);
    if (rc == 0) return true;
    if (errno == EOPNOTSUPP || errno == ENOSYS) return false;
    throw IoError(errno, "preallocate", path_, 0, static_cast<int64_t>(length));
}

void File::truncate(uint64_t length) const {
    const std::shared_ptr<const Descriptors> open = await_descriptors({true, false});
    int rc;
    do {
        rc = ::ftruncate(open->any(), static_cast<off_t>(length));
    } while (rc != 0 && errno == EINTR);
    if (rc != 0) throw IoError(errno, "truncate", path_, -1, static_cast<int64_t>(length));
}

void File::check_written() const {
    if (closable_ != nullptr) {
        if (const std::optional<IoError> lost = closable_->take_lost()) throw IoError(*lost);
    }
    const std::shared_ptr<const Descriptors> open = opened();
    if (open == nullptr) return;  // all was on the drive when it was closed
    if (::sync_file_range(open->any(), 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE) == 0) return;
    if (errno == ENOSYS || errno == ESPIPE) return;  // no page cache behind it
    throw IoError(errno, "write", path_, -1, -1,
                  "it was in the page cache, and the kernel could not write it");
}

void File::sync() const {
    // Not retried on any error: after a failed fdatasync the kernel may have dropped the dirty pages, and a
    // second call would report success for data that is lost.
    const std::shared_ptr<const Descriptors> open = await_descriptors();
    if (closable_ != nullptr) {
        if (const std::optional<IoError> lost = closable_->take_lost())
            throw IoError(lost->code, "sync", path_);
    }
    if (::fdatasync(open->any()) != 0) throw IoError(errno, "sync", path_);
}

void exchange(const std::string& first, const std::string& second) {
    constexpr unsigned kRenameExchange =
        2;  // RENAME_EXCHANGE of <linux/fs.h>; glibc has renameat2 since 2.28
    if (::syscall(SYS_renameat2, AT_FDCWD, first.c_str(), AT_FDCWD, second.c_str(), kRenameExchange) == 0)
        return;
    const int error = errno;
    const bool missing = error == EINVAL || error == ENOSYS;
    throw IoError(error, "exchange with " + second, first, -1, -1,
                  missing
                      ? "this file system cannot exchange two directories in one step; save under another "
                        "name"
                      : "");
}

}  // namespace swapper
