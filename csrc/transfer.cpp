#include "transfer.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace swapper {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");

long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    return ::syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG,
                     value, timeout, nullptr, 0);
}

}  // namespace

Transfer::Transfer(Operation operation, std::shared_ptr<const File> file, char* data, uint64_t length,
                   uint64_t offset, uint64_t key, std::shared_ptr<Checksums> checksums, DeviceTarget device)
    : operation_(operation),
      file_(std::move(file)),
      data_(data),
      length_(length),
      offset_(offset),
      key_(key),
      checksums_(std::move(checksums)),
      device_(std::move(device)) {}

bool Transfer::wait(int64_t timeout_ms) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (!done()) {
        const auto left =
            std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now())
                .count();
        if (left <= 0) return false;
        timespec timeout{};
        timeout.tv_sec = static_cast<time_t>(left / 1000000000);
        timeout.tv_nsec = static_cast<long>(left % 1000000000);
        futex(state_, FUTEX_WAIT, kPending, &timeout);  // woken, timed out or interrupted: look again
    }
    return true;
}

uint64_t Transfer::result() const {
    if (failed()) throw IoError(*error_);
    return length_;
}

void Transfer::complete() {
    ended_ = std::chrono::steady_clock::now();
    if (cut_ == 0) begun_ = ended_;
    state_.store(error_ ? kFailed : kComplete, std::memory_order_release);
    futex(state_, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace swapper
