#include "pinned.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "error.h"

namespace swapper {
namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14
#endif

void populate(char* data, uint64_t length) {
    int rc;
    do {
        rc = ::madvise(data, length, kPopulateWrite);
    } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
    if (rc == 0) return;
    if (errno != EINVAL) {
        throw IoError(errno, "allocate pinned memory", "", -1, static_cast<int64_t>(length));
    }
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    for (uint64_t at = 0; at < length; at += page) {
        reinterpret_cast<volatile char*>(data)[at] = 0;
    }
}

std::string lock_reason(int error) {
    std::string reason = std::string("mlock: ") + std::strerror(error);
    struct rlimit limit{};
    if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        reason += " (RLIMIT_MEMLOCK is " + std::to_string(limit.rlim_cur) + " bytes: raise `ulimit -l`)";
    }
    return reason;
}

}  // namespace

Slab::Slab(uint64_t length, uint64_t ready) : length_(length), owner_(::getpid()) {
    if (length == 0 || length > (uint64_t{1} << 62)) {
        throw IoError(EINVAL, "allocate pinned memory", "", -1, static_cast<int64_t>(length));
    }
    // Whole huge pages, so that the last one can be huge too and no neighbour shares it. What is smaller than
    // one takes pages: programs make many small ones, and each must fit RLIMIT_MEMLOCK.
    alignment_ = length < kAlignment ? static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) : kAlignment;
    mapped_ = round_up(length);
    // A mapping is aligned to a page only: map one alignment more, and give back what sticks out.
    void* wide =
        ::mmap(nullptr, mapped_ + alignment_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (wide == MAP_FAILED) {
        throw IoError(errno, "allocate pinned memory", "", -1, static_cast<int64_t>(length));
    }
    char* const begin = static_cast<char*>(wide);
    const uint64_t before = (alignment_ - reinterpret_cast<uintptr_t>(begin) % alignment_) % alignment_;
    data_ = begin + before;
    if (before > 0) ::munmap(begin, before);
    if (before < alignment_) ::munmap(data_ + mapped_, alignment_ - before);
    try {
        (void)::madvise(data_, mapped_, MADV_HUGEPAGE);  // speed only: the kernel may lack it
        if (::madvise(data_, mapped_, MADV_DONTFORK) != 0) {
            throw IoError(errno, "madvise(MADV_DONTFORK)", "", -1, static_cast<int64_t>(length));
        }
        extend(ready);
    } catch (...) {
        ::munmap(data_, mapped_);
        throw;
    }
}

Slab::~Slab() {
    // In a child the addresses are not ours: something else may have been mapped there since.
    if (in_owner_process()) ::munmap(data_, mapped_);
}

uint64_t Slab::round_up(uint64_t length) const {
    return (length + alignment_ - 1) / alignment_ * alignment_;
}

void Slab::extend(uint64_t ready) {
    if (!in_owner_process()) throw StateError("this memory belongs to the parent process");
    if (ready > length_) throw std::invalid_argument("more than the length of the memory");
    const uint64_t from = round_up(ready_);
    const uint64_t to = round_up(ready);
    if (to > from) {
        try {
            populate(data_ + from, to - from);
        } catch (...) {
            (void)::madvise(data_ + from, to - from, MADV_DONTNEED);  // the part that was to be had
            throw;
        }
        if (::mlock(data_ + from, to - from) != 0) lock_refusal_ = lock_reason(errno);
    }
    ready_ = std::max(ready_, std::min(to, length_));
}

void Slab::shrink(uint64_t ready) {
    if (!in_owner_process() || ready >= ready_) return;
    const uint64_t from = round_up(ready);
    const uint64_t to = round_up(ready_);
    if (to > from) {
        (void)::munlock(data_ + from, to - from);  // can only fail for addresses that are not mapped
        if (::madvise(data_ + from, to - from, MADV_DONTNEED) != 0) {
            throw IoError(errno, "madvise(MADV_DONTNEED)", "", -1, static_cast<int64_t>(to - from));
        }
    }
    ready_ = std::min(from, length_);
    if (ready_ == 0) lock_refusal_.clear();
}

void Slab::unlock() {
    if (!in_owner_process()) return;
    // Also if a part could not be locked: the others are. It can only fail for addresses that are not mapped.
    (void)::munlock(data_, mapped_);
    if (locked()) lock_refusal_ = "it was unlocked";
}

bool Slab::in_owner_process() const {
    return ::getpid() == owner_;
}

}  // namespace swapper
