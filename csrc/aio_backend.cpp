// Kernel AIO (io_submit), by raw system call: overlaps only with O_DIRECT, else it blocks in `submit`.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "backend.h"
#include "error.h"
#include "unique_fd.h"

namespace swapper {
namespace {

constexpr uint16_t kCmdRead = 0;
constexpr uint16_t kCmdWrite = 1;
constexpr uint16_t kCmdPoll = 5;  // Linux 4.19; older headers do not name it
constexpr long kUnarmedWaitNs = 5000000;

class AioBackend final : public Backend {
  public:
    explicit AioBackend(uint32_t queue_depth) : iocbs_(queue_depth), pointers_(queue_depth) {
        wake_fd_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (!wake_fd_.valid()) throw IoError(errno, "eventfd");
        if (::syscall(SYS_io_setup, queue_depth + 1, &context_) != 0) {
            const char* detail = errno == EAGAIN ? "fs.aio-max-nr is used up" : "";
            throw IoError(errno, "io_setup", "", -1, -1, detail);
        }
        if (const int error = arm_wake(); error != 0) {
            ::syscall(SYS_io_destroy, context_);
            throw IoError(error, "io_submit of a poll", "", -1, -1, "needs Linux 4.19");
        }
    }

    // Waits for what is in flight, and cancels the poll.
    ~AioBackend() override { ::syscall(SYS_io_destroy, context_); }

    size_t submit(Request* const* requests, size_t count) override {
        for (size_t i = 0; i < count; ++i) {
            iocb& block = iocbs_[i];
            block = {};
            const Request& request = *requests[i];
            block.aio_data = reinterpret_cast<uintptr_t>(requests[i]);
            block.aio_lio_opcode = request.operation == Operation::kRead ? kCmdRead : kCmdWrite;
            block.aio_fildes = static_cast<uint32_t>(request.fd);
            block.aio_buf = reinterpret_cast<uintptr_t>(request.data);
            block.aio_nbytes = request.length;
            block.aio_offset = static_cast<int64_t>(request.offset);
            pointers_[i] = &block;
        }
        size_t taken = 0;
        while (taken < count) {
            const long rc = ::syscall(SYS_io_submit, context_, count - taken, pointers_.data() + taken);
            if (rc > 0) {
                taken += static_cast<size_t>(rc);
                continue;
            }
            if (rc == 0 || errno == EAGAIN) break;
            if (errno == EINTR) continue;
            // It is the first of those left that was refused.
            refused_.push_back({requests[taken], -errno});
            ++taken;
        }
        return taken;
    }

    size_t reap(Completion* completions, size_t capacity, bool block) override {
        size_t count = std::min(capacity, refused_.size());
        std::copy_n(refused_.begin(), count, completions);
        refused_.erase(refused_.begin(), refused_.begin() + static_cast<std::ptrdiff_t>(count));
        if (count == capacity) return count;
        block = block && count == 0;
        timespec limit{};
        bool limited = !block;
        if (!wake_armed_) {
            if (const int error = arm_wake(); error == EAGAIN) {
                // No room: taking what is over makes some. Until then nobody can wake us, so look every now
                // and then.
                limited = true;
                limit.tv_nsec = block ? kUnarmedWaitNs : 0;
            } else if (error != 0) {
                throw IoError(error, "io_submit of a poll");
            }
        }
        io_event events[64];
        const auto room = static_cast<long>(std::min<size_t>(capacity - count, 64));
        const long rc =
            ::syscall(SYS_io_getevents, context_, block ? 1L : 0L, room, events, limited ? &limit : nullptr);
        if (rc < 0) {
            if (errno == EINTR) return count;
            throw IoError(errno, "io_getevents");
        }
        for (long i = 0; i < rc; ++i) {
            if (events[i].data == 0) {
                wake_armed_ = false;
                uint64_t ignored;
                (void)!::read(wake_fd_.get(), &ignored, sizeof ignored);
            } else {
                completions[count++] = {reinterpret_cast<Request*>(static_cast<uintptr_t>(events[i].data)),
                                        events[i].res};
            }
        }
        return count;
    }

    void wake() override {
        const uint64_t one = 1;
        (void)!::write(wake_fd_.get(), &one, sizeof one);  // fails only when it is as high as can be already
    }

    int set_pieces(const std::vector<Piece>& pieces) override { return pieces.empty() ? 0 : EOPNOTSUPP; }

  private:
    int arm_wake() {
        iocb block{};
        block.aio_lio_opcode = kCmdPoll;
        block.aio_fildes = static_cast<uint32_t>(wake_fd_.get());
        block.aio_buf = POLLIN;
        iocb* pointer = &block;
        if (::syscall(SYS_io_submit, context_, 1L, &pointer) != 1) return errno;
        wake_armed_ = true;
        return 0;
    }

    aio_context_t context_ = 0;
    UniqueFd wake_fd_;
    bool wake_armed_ = false;
    std::vector<iocb> iocbs_;
    std::vector<iocb*> pointers_;
    std::vector<Completion> refused_;
};

}  // namespace

std::unique_ptr<Backend> make_aio_backend(uint32_t queue_depth) {
    return std::make_unique<AioBackend>(queue_depth);
}

}  // namespace swapper
