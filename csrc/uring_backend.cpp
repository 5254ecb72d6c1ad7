// io_uring, by raw system call. The structures are those of <linux/io_uring.h>, spelled out so that the build
// does not depend on the age of the headers. See io_uring(7), io_uring_setup(2), io_uring_enter(2).
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "backend.h"
#include "error.h"
#include "unique_fd.h"

namespace swapper {
namespace {

constexpr long kSysSetup = 425;  // the same on every architecture
constexpr long kSysEnter = 426;
constexpr long kSysRegister = 427;

struct SubmissionEntry {
    uint8_t opcode;
    uint8_t flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t length;
    uint32_t operation_flags;
    uint64_t user_data;
    uint16_t buffer_index;
    uint16_t personality;
    int32_t splice_fd;
    uint64_t spare[2];
};
static_assert(sizeof(SubmissionEntry) == 64, "layout of struct io_uring_sqe");

struct CompletionEntry {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};
static_assert(sizeof(CompletionEntry) == 16, "layout of struct io_uring_cqe");

struct RingOffsets {
    uint32_t head, tail, mask, entries;
    uint32_t flags_or_overflow, dropped_or_entries, array_or_flags, spare;
    uint64_t user_address;
};

struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, spare[3];
    RingOffsets sq, cq;
};
static_assert(sizeof(Params) == 120, "layout of struct io_uring_params");

struct ProbeOp {
    uint8_t op, spare1;
    uint16_t flags;
    uint32_t spare2;
};
struct Probe {
    uint8_t last_op, count;
    uint16_t spare1;
    uint32_t spare2[3];
    ProbeOp ops[64];
};

constexpr uint8_t kReadFixed = 4;
constexpr uint8_t kWriteFixed = 5;
constexpr uint8_t kPollAdd = 6;
constexpr uint8_t kRead = 22;
constexpr uint8_t kWrite = 23;
constexpr uint32_t kEnterGetEvents = 1;
constexpr uint32_t kRegisterBuffers = 0;
constexpr uint32_t kUnregisterBuffers = 1;
constexpr uint32_t kRegisterProbe = 8;
constexpr uint16_t kOpSupported = 1;
constexpr uint32_t kFeatureSingleMmap = 1;  // Linux 5.4
constexpr uint32_t kSetupCoopTaskrun = 1U << 8;
constexpr uint32_t kSetupSingleIssuer = 1U << 12;
constexpr uint32_t kSetupDeferTaskrun = 1U << 13;
constexpr uint32_t kMaxStalls = 2000;  // calls in a row that the kernel refused, 1 ms each
constexpr off_t kOffsetRings = 0;
constexpr off_t kOffsetEntries = 0x10000000;

class Mapping {
  public:
    Mapping() = default;
    Mapping(int fd, size_t length, off_t offset) : length_(length) {
        data_ = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
        if (data_ == MAP_FAILED) throw IoError(errno, "mmap of an io_uring");
        (void)::madvise(data_, length, MADV_DONTFORK);  // a child has no business with the ring
    }
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, MAP_FAILED)), length_(std::exchange(other.length_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(length_, other.length_);
        return *this;
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() {
        if (data_ != MAP_FAILED) ::munmap(data_, length_);
    }
    template <typename T>
    T* at(uint32_t offset) const {
        return reinterpret_cast<T*>(static_cast<char*>(data_) + offset);
    }

  private:
    void* data_ = MAP_FAILED;
    size_t length_ = 0;
};

class UringBackend final : public Backend {
  public:
    explicit UringBackend(uint32_t queue_depth) {
        wake_fd_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (!wake_fd_.valid()) throw IoError(errno, "eventfd");
        setup(queue_depth + 1);  // one more for the wake-up poll
        check_operations();
        refused_.reserve(queue_depth);
        // Used once for real: setting up may be allowed where entering is not.
        arm_wake();
        enter(0);
    }

    ~UringBackend() override {
        // Only after a failure is anything in flight: the kernel may not write into memory that is given
        // back.
        try {
            Completion ignored[16];
            while (in_flight_ > 0) reap(ignored, 16, true);
        } catch (const IoError&) {
            // The ring does not answer; closing it cancels.
        }
    }

    size_t submit(Request* const* requests, size_t count) override {
        size_t taken = 0;
        for (; taken < count; ++taken) {
            SubmissionEntry* entry = next_entry();
            if (entry == nullptr) break;
            const Request& request = *requests[taken];
            const bool read = request.operation == Operation::kRead;
            entry->fd = request.fd;
            entry->offset = request.offset;
            entry->address = reinterpret_cast<uintptr_t>(request.data);
            entry->length = request.length;
            entry->user_data = reinterpret_cast<uintptr_t>(requests[taken]);
            if (request.buffer_index >= 0) {
                entry->opcode = read ? kReadFixed : kWriteFixed;
                entry->buffer_index = static_cast<uint16_t>(request.buffer_index);
            } else {
                entry->opcode = read ? kRead : kWrite;
            }
            publish_entry();
            ++in_flight_;
        }
        // What the kernel does not take now stays in the queue for the next call.
        if (unsubmitted_ > 0) enter(0);
        return taken;
    }

    size_t reap(Completion* completions, size_t capacity, bool block) override {
        size_t count = std::min(capacity, refused_.size());
        if (count > 0) {
            std::copy_n(refused_.begin(), count, completions);
            refused_.erase(refused_.begin(), refused_.begin() + static_cast<std::ptrdiff_t>(count));
            in_flight_ -= count;
            return count;
        }
        if (!wake_armed_) arm_wake();
        // With deferred task work completions appear only inside the call, so it is made even to look.
        if (!available() || unsubmitted_ > 0) enter(block && !available() ? 1 : 0);
        uint32_t head = *cq_head_;
        const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
        while (head != tail && count < capacity) {
            const CompletionEntry& entry = cqes_[head & cq_mask_];
            ++head;
            if (entry.user_data == 0) {
                wake_armed_ = false;
                uint64_t ignored;
                (void)!::read(wake_fd_.get(), &ignored, sizeof ignored);
            } else {
                completions[count++] = {reinterpret_cast<Request*>(static_cast<uintptr_t>(entry.user_data)),
                                        entry.result};
                --in_flight_;
            }
        }
        __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
        return count;
    }

    void wake() override {
        const uint64_t one = 1;
        (void)!::write(wake_fd_.get(), &one, sizeof one);  // fails only when it is as high as can be already
    }

    int set_pieces(const std::vector<Piece>& pieces) override {
        // Before Linux 5.13 registration waits for all requests of the ring, so the wake-up poll must end.
        Completion none;
        while (wake_armed_) {
            wake();
            reap(&none, 0, true);
            consume_wake();
        }
        if (registered_) {
            if (::syscall(kSysRegister, ring_.get(), kUnregisterBuffers, nullptr, 0) != 0) return errno;
            registered_ = false;
        }
        if (pieces.empty()) return 0;
        std::vector<iovec> vectors;
        for (const Piece& piece : pieces) vectors.push_back({piece.data, piece.length});
        if (::syscall(kSysRegister, ring_.get(), kRegisterBuffers, vectors.data(), vectors.size()) != 0)
            return errno;
        registered_ = true;
        return 0;
    }

  private:
    void setup(uint32_t entries) {
        // The best first: completions are then handled when we ask for them, without interrupting the thread.
        Params params{};
        for (const uint32_t flags : {kSetupSingleIssuer | kSetupDeferTaskrun, kSetupCoopTaskrun, 0U}) {
            params = {};
            params.flags = flags;
            ring_ = UniqueFd(static_cast<int>(::syscall(kSysSetup, entries, &params)));
            if (ring_.valid() || errno != EINVAL) break;
        }
        if (!ring_.valid()) {
            const char* detail =
                errno == ENOSYS   ? "needs Linux 5.6, or the container forbids it"
                : errno == EPERM  ? "forbidden by the container's seccomp profile or kernel.io_uring_disabled"
                : errno == ENOMEM ? "RLIMIT_MEMLOCK: raise `ulimit -l`"
                                  : "";
            throw IoError(errno, "io_uring_setup", "", -1, -1, detail);
        }
        if ((params.features & kFeatureSingleMmap) == 0) {
            throw IoError(ENOSYS, "io_uring_setup", "", -1, -1, "needs Linux 5.6");
        }
        const size_t length =
            std::max<size_t>(params.sq.array_or_flags + params.sq_entries * sizeof(uint32_t),
                             params.cq.dropped_or_entries + params.cq_entries * sizeof(CompletionEntry));
        rings_ = Mapping(ring_.get(), length, kOffsetRings);
        entries_ = Mapping(ring_.get(), params.sq_entries * sizeof(SubmissionEntry), kOffsetEntries);
        sq_head_ = rings_.at<uint32_t>(params.sq.head);
        sq_tail_ = rings_.at<uint32_t>(params.sq.tail);
        sq_entries_ = params.sq_entries;
        cq_head_ = rings_.at<uint32_t>(params.cq.head);
        cq_tail_ = rings_.at<uint32_t>(params.cq.tail);
        cq_mask_ = *rings_.at<uint32_t>(params.cq.mask);
        cqes_ = rings_.at<CompletionEntry>(params.cq.dropped_or_entries);
        sqes_ = entries_.at<SubmissionEntry>(0);
        // Entry i of the ring is always entry i of the table.
        auto* array = rings_.at<uint32_t>(params.sq.array_or_flags);
        for (uint32_t i = 0; i < sq_entries_; ++i) array[i] = i;
    }

    void check_operations() {
        Probe probe{};
        if (::syscall(kSysRegister, ring_.get(), kRegisterProbe, &probe, 64) != 0) {
            throw IoError(errno, "io_uring_register of a probe", "", -1, -1, "needs Linux 5.6");
        }
        for (const uint8_t op : {kReadFixed, kWriteFixed, kPollAdd, kRead, kWrite}) {
            if ((probe.ops[op].flags & kOpSupported) == 0) {
                throw IoError(EOPNOTSUPP, "io_uring_register of a probe", "", -1, -1,
                              "operation " + std::to_string(op) + " is missing: needs Linux 5.6");
            }
        }
    }

    SubmissionEntry* next_entry() {
        const uint32_t head = __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
        if (*sq_tail_ - head == sq_entries_) return nullptr;
        SubmissionEntry* entry =
            &sqes_[*sq_tail_ & (sq_entries_ - 1)];  // the kernel rounds to a power of two
        *entry = {};
        return entry;
    }

    void publish_entry() {
        __atomic_store_n(sq_tail_, *sq_tail_ + 1, __ATOMIC_RELEASE);
        ++unsubmitted_;
    }

    void arm_wake() {
        SubmissionEntry* entry = next_entry();
        if (entry == nullptr) return;  // full of requests: they will wake us, and then there is room
        entry->opcode = kPollAdd;
        entry->fd = wake_fd_.get();
        // The mask is 32 bits, its halves swapped on big-endian machines, of which we build for none.
        entry->operation_flags = POLLIN;
        entry->user_data = 0;
        publish_entry();
        wake_armed_ = true;
    }

    bool available() const { return *cq_head_ != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); }

    // Submits what is queued and waits for `wanted` completions.
    void enter(uint32_t wanted) {
        const long rc = ::syscall(kSysEnter, ring_.get(), unsubmitted_, wanted, kEnterGetEvents, nullptr, 0);
        if (rc >= 0) {
            unsubmitted_ -= static_cast<uint32_t>(rc);
            stalls_ = 0;
            return;
        }
        const int error = errno;
        if (error == EINTR) return;
        if (error != EAGAIN && error != EBUSY && error != ENOMEM) {
            throw IoError(
                error, "io_uring_enter", "", -1, -1,
                error == EPERM || error == ENOSYS ? "forbidden by the container's seccomp profile" : "");
        }
        // The kernel lacks memory for the requests, and took none. They are the caller's again.
        if (take_back(error) > 0) return;
        if (++stalls_ > kMaxStalls) throw IoError(error, "io_uring_enter");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    // Ends all that is published and was not taken by the kernel. Returns how many of them are requests.
    size_t take_back(int error) {
        const size_t before = refused_.size();
        uint32_t tail = *sq_tail_;
        for (; unsubmitted_ > 0; --unsubmitted_) {
            const SubmissionEntry& entry = sqes_[--tail & (sq_entries_ - 1)];
            if (entry.user_data == 0) {
                wake_armed_ = false;
            } else {
                refused_.push_back(
                    {reinterpret_cast<Request*>(static_cast<uintptr_t>(entry.user_data)), -error});
            }
        }
        __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
        std::reverse(refused_.begin() + static_cast<std::ptrdiff_t>(before), refused_.end());
        return refused_.size() - before;
    }

    // Takes the completion of the wake-up poll; nothing else is in flight.
    void consume_wake() {
        uint32_t head = *cq_head_;
        while (head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) {
            ++head;
            wake_armed_ = false;
            uint64_t ignored;
            (void)!::read(wake_fd_.get(), &ignored, sizeof ignored);
        }
        __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    }

    UniqueFd wake_fd_;
    UniqueFd ring_;
    Mapping rings_;
    Mapping entries_;
    uint32_t* sq_head_ = nullptr;
    uint32_t* sq_tail_ = nullptr;
    uint32_t sq_entries_ = 0;
    uint32_t* cq_head_ = nullptr;
    uint32_t* cq_tail_ = nullptr;
    uint32_t cq_mask_ = 0;
    CompletionEntry* cqes_ = nullptr;
    SubmissionEntry* sqes_ = nullptr;
    uint32_t unsubmitted_ = 0;  // published, but not taken by the kernel
    std::vector<Completion> refused_;
    uint32_t stalls_ = 0;
    size_t in_flight_ = 0;
    bool wake_armed_ = false;
    bool registered_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(uint32_t queue_depth) {
    return std::make_unique<UringBackend>(queue_depth);
}

}  // namespace swapper
