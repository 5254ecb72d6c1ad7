#include "open_files.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace swapper {
namespace {

constexpr size_t kLeastDescriptors = 8;

// struct statx of Linux 4.11, spelled out so that the build does not depend on the age of the headers.
struct Statx {
    uint32_t mask, block_bytes;
    uint64_t attributes;
    uint32_t links, user, group;
    uint16_t mode, spare;
    uint64_t inode, size, blocks, attributes_mask;
    struct Time {
        int64_t seconds;
        uint32_t nanoseconds;
        int32_t reserved;
    } accessed, born, changed, modified;
    uint32_t special_major, special_minor, device_major, device_minor;
    uint64_t rest[14];
};
static_assert(offsetof(Statx, born) == 0x50 && sizeof(Statx) == 256, "layout of struct statx");
constexpr unsigned kStatxInode = 0x100;
constexpr unsigned kStatxBorn = 0x800;

// Inode numbers there are those of a server or a program, which may give a file another one once it is
// closed.
bool is_remote(int fd) {
    struct statfs info{};
    if (::fstatfs(fd, &info) != 0) return true;
    switch (static_cast<uint32_t>(info.f_type)) {
        case 0x65735546:  // FUSE
        case 0x01021997:  // 9p
        case 0xFF534D42:  // CIFS
        case 0xFE534D42:  // SMB2
        case 0x6969:      // NFS
            return true;
        default:
            return false;
    }
}

// A quarter of what the process may have open. Asked each time: the user may change it.
size_t most_descriptors() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kLeastDescriptors;
    return static_cast<size_t>(std::max<rlim_t>(limit.rlim_cur / 4, kLeastDescriptors));
}

// Writes what the page cache has of a file, and waits for it. Needs no flush of the drive and no commit of
// the journal, as fdatasync does: after it no write can fail any more. False with errno. Not again after an
// error, which the kernel may tell only once; see File::sync.
bool write_back(int fd) {
    constexpr unsigned kAll =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    int rc;
    do {
        rc = ::sync_file_range(fd, 0, 0, kAll);
        if (rc != 0 && (errno == ENOSYS || errno == ESPIPE)) rc = ::fdatasync(fd);
    } while (rc != 0 && errno == EINTR);
    return rc == 0;
}

}  // namespace

int open_with_room(const std::string& path, int flags) {
    for (;;) {
        const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
        if (fd >= 0) return fd;
        if (errno == EINTR) continue;
        const int error = errno;
        if ((error != EMFILE && error != ENFILE) || !OpenFiles::get().close_one()) {
            errno = error;
            return -1;
        }
    }
}

int ClosableFile::identify(int directory, const char* path, int flags, Identity& identity) {
    Statx info{};
#ifdef SYS_statx
    if (::syscall(SYS_statx, directory, path, flags, kStatxInode | kStatxBorn, &info) != 0) return errno;
#else
    (void)directory, (void)path, (void)flags;
#endif
    if ((info.mask & kStatxInode) == 0 || (info.mask & kStatxBorn) == 0) return EOPNOTSUPP;
    identity = {info.device_major, info.device_minor, info.inode, info.born.seconds, info.born.nanoseconds};
    return 0;
}

std::shared_ptr<ClosableFile> ClosableFile::of(std::string path, int flags,
                                               std::shared_ptr<const Descriptors> open) {
    const int fd = open->buffered.get();
    struct stat info{};
    if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || is_remote(fd)) return nullptr;
    auto file = std::make_shared<ClosableFile>();
    if (identify(fd, "", AT_EMPTY_PATH, file->identity_) != 0) return nullptr;
    // Also the name of a file that was opened by a relative one, or through a symbolic link.
    std::string name(4096, '\0');
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = ::readlink(link.c_str(), name.data(), name.size());
    if (length <= 0 || static_cast<size_t>(length) == name.size() || name[0] != '/') return nullptr;
    name.resize(static_cast<size_t>(length));
    name.shrink_to_fit();
    file->path_ = std::move(path);
    file->name_ = std::move(name);
    file->flags_ = flags;
    file->direct_ = open->direct.valid();
    file->open_ = std::move(open);
    OpenFiles& all = OpenFiles::get();
    {
        const std::lock_guard<std::mutex> lock(all.mutex_);
        all.open_.push_front(file);
        file->at_ = all.open_.begin();
        file->place_ = Place::kOpen;
        all.count_ += file->open_->count();
    }
    all.make_room();
    return file;
}

std::shared_ptr<const Descriptors> ClosableFile::opened(Need need) {
    OpenFiles& all = OpenFiles::get();
    const std::lock_guard<std::mutex> lock(all.mutex_);
    if (open_ == nullptr || !open_->will_do(need)) return nullptr;
    if (place_ == Place::kOpen) all.move(*this, Place::kOpen);  // used now
    return open_;
}

std::shared_ptr<const Descriptors> ClosableFile::descriptors(Need need) {
    if (auto found = opened(need)) return found;
    std::shared_ptr<const Descriptors> former;
    std::shared_ptr<const Descriptors> made = open_again(need);
    OpenFiles& all = OpenFiles::get();
    {
        const std::lock_guard<std::mutex> lock(all.mutex_);
        // Another thread may have opened them meanwhile: then there are two, and these go.
        if (open_ != nullptr && open_->will_do(need)) return open_;
        if (place_ != Place::kEnded) {
            former = std::move(open_);
            if (place_ == Place::kOpen) all.count_ -= former->count();
            open_ = made;
            if (place_ == Place::kKept) {
                superseded_.push_back(former);  // somebody may have its number
            } else {
                all.count_ += made->count();
                all.move(*this, Place::kOpen);
            }
        }
    }
    former.reset();
    all.make_room();
    return made;
}

struct stat ClosableFile::status() {
    struct stat info{};
    if (const std::shared_ptr<const Descriptors> open = opened(Need{})) {
        if (::fstat(open->any(), &info) != 0) throw IoError(errno, "stat", path_);
        return info;
    }
    check_name();
    if (::lstat(name_.c_str(), &info) != 0) throw refusal(errno);
    return info;
}

std::shared_ptr<const Descriptors> ClosableFile::keep_open() {
    OpenFiles& all = OpenFiles::get();
    for (;;) {
        std::shared_ptr<const Descriptors> found = descriptors({false, true});
        const std::lock_guard<std::mutex> lock(all.mutex_);
        if (place_ == Place::kKept || place_ == Place::kEnded) return found;
        if (open_ != found) continue;  // closed, or opened for writing, by another thread
        all.count_ -= found->count();
        all.move(*this, Place::kKept);
        return found;
    }
}

std::optional<IoError> ClosableFile::take_lost() {
    const std::lock_guard<std::mutex> lock(OpenFiles::get().mutex_);
    return std::exchange(lost_, std::nullopt);
}

void ClosableFile::end() {
    std::shared_ptr<const Descriptors> former;  // closed when the mutex is free
    std::shared_ptr<ClosableFile> self;
    OpenFiles& all = OpenFiles::get();
    const std::lock_guard<std::mutex> lock(all.mutex_);
    if (place_ == Place::kEnded) return;
    former = std::move(open_);
    open_.reset();
    if (place_ == Place::kOpen) all.count_ -= former->count();
    self = std::move(*at_);
    (place_ == Place::kOpen ? all.open_ : all.others_).erase(at_);
    place_ = Place::kEnded;
}

bool ClosableFile::is_at_or_beneath(const std::string& path) const {
    return name_.compare(0, path.size(), path) == 0 &&
           (name_.size() == path.size() || name_[path.size()] == '/' || path == "/");
}

IoError ClosableFile::refusal(int error) const {
    const std::string closed =
        "it was closed while it was not used, as more files are in use than `ulimit -n` has room for";
    if (error == ESTALE) {
        return IoError(error, "open again", path_, -1, -1,
                       "another file has its name now, and " + closed +
                           ": leave the file in its place, or raise `ulimit -n`");
    }
    return IoError(error, "open again", path_, -1, -1, closed);
}

void ClosableFile::check_name() const {
    Identity found{};
    const int error = identify(AT_FDCWD, name_.c_str(), AT_SYMLINK_NOFOLLOW, found);
    if (error != 0) throw refusal(error);
    if (!(found == identity_)) throw refusal(ESTALE);
}

std::shared_ptr<const Descriptors> ClosableFile::open_again(Need need) const {
    check_name();  // What has the name now may be a pipe, and `open` would wait.
    auto made = std::make_shared<Descriptors>();
    const bool buffered = need.buffered || !direct_;
    int flags = flags_;
    const int more = O_NOFOLLOW | (buffered ? 0 : O_DIRECT);
    UniqueFd fd(open_with_room(name_, flags | more));
    const bool forbidden =
        !fd.valid() && (errno == EACCES || errno == EPERM || errno == EROFS || errno == ETXTBSY);
    if (forbidden && !need.writes && (flags & O_ACCMODE) == O_RDWR) {
        // Who has the file as a checkpoint too has made it read-only: reading it is all that is wanted.
        flags = (flags & ~O_ACCMODE) | O_RDONLY;
        made->writable = false;
        fd = UniqueFd(open_with_room(name_, flags | more));
    }
    if (!fd.valid()) throw refusal(errno);
    Identity found{};
    const int error = identify(fd.get(), "", AT_EMPTY_PATH, found);
    if (error != 0) throw refusal(error);
    if (!(found == identity_)) throw refusal(ESTALE);
    if (!buffered) {
        made->direct = std::move(fd);
        return made;
    }
    made->buffered = std::move(fd);
    if (!direct_) return made;
    const std::string same_file = "/proc/self/fd/" + std::to_string(made->buffered.get());
    made->direct = UniqueFd(open_with_room(same_file, flags | O_DIRECT));
    if (!made->direct.valid()) throw refusal(errno);
    (void)::posix_fadvise(made->buffered.get(), 0, 0, POSIX_FADV_RANDOM);  // see File::open_direct
    return made;
}

OpenFiles& OpenFiles::get() {
    static OpenFiles* const all = new OpenFiles;
    return *all;
}

OpenFiles::OpenFiles() {
    // Another thread may have the mutex when this one forks: the child would wait for ever for a thread that
    // it does not have.
    (void)::pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                           [] { get().mutex_.unlock(); });
}

void OpenFiles::move(ClosableFile& file, ClosableFile::Place place) {
    Files& from = file.place_ == ClosableFile::Place::kOpen ? open_ : others_;
    Files& to = place == ClosableFile::Place::kOpen ? open_ : others_;
    to.splice(to.begin(), from, file.at_);
    file.place_ = place;
}

bool OpenFiles::close_one_above(size_t limit) {
    using Place = ClosableFile::Place;
    for (;;) {
        std::shared_ptr<ClosableFile> file;
        std::shared_ptr<const Descriptors> its;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (count_ <= limit) return false;
            for (auto at = open_.rbegin(); at != open_.rend(); ++at) {
                // One holder is the list. There is no second one without the mutex.
                if ((*at)->leaving_ || (*at)->open_.use_count() > 1) continue;
                file = *at;
                its = file->open_;
                file->leaving_ = true;
                break;
            }
        }
        if (file == nullptr) return false;
        std::optional<IoError> lost;
        const bool unsynced = file->unsynced_.exchange(false);
        if (unsynced && !write_back(its->any())) {
            lost = IoError(errno, "write", file->path_, -1, -1,
                           "it was in the page cache, and the kernel could not write it");
        }
        ClosableFile::Identity found{};
        const bool named =
            ClosableFile::identify(AT_FDCWD, file->name_.c_str(), AT_SYMLINK_NOFOLLOW, found) == 0 &&
            found == file->identity_;
        bool closed = false;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            file->leaving_ = false;
            if (lost) file->lost_ = std::move(lost);
            if (file->place_ != Place::kOpen || file->open_ != its) continue;
            if (!named) {
                count_ -= its->count();
                move(*file, Place::kKept);
                continue;
            }
            // Used meanwhile: then it has become one of the most recently used.
            if (its.use_count() > 2 || file->unsynced_.load(std::memory_order_relaxed)) continue;
            count_ -= its->count();
            file->open_.reset();
            move(*file, Place::kClosed);
            closed = true;
        }
        its.reset();
        if (closed) return true;
    }
}

void OpenFiles::make_room() {
    const size_t limit = most_descriptors();
    while (close_one_above(limit)) {
    }
}

bool OpenFiles::close_one() {
    return close_one_above(0);
}

void OpenFiles::keep_open(const std::string& path) {
    std::vector<std::shared_ptr<ClosableFile>> found;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const Files* files : {&open_, &others_}) {
            for (const std::shared_ptr<ClosableFile>& file : *files) {
                if (file->is_at_or_beneath(path)) found.push_back(file);
            }
        }
    }
    for (const std::shared_ptr<ClosableFile>& file : found) file->keep_open();
}

bool OpenFiles::in_use() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(open_.begin(), open_.end(),
                       [](const std::shared_ptr<ClosableFile>& file) { return file->open_.use_count() > 1; });
}

size_t OpenFiles::open_descriptors() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_;
}

}  // namespace swapper
