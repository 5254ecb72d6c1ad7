// What a caller asked for, and waits for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checksums.h"
#include "cufile.h"
#include "error.h"
#include "file.h"
#include "request.h"

namespace swapper {

// One asynchronous read or write. Shared by the caller and the engine, so either may let go first; the memory
// is the caller's and must stay until `done()`. Has no thread or lock of its own, so that a forked child can
// destroy what it inherited.
class Transfer {
  public:
    Transfer(Operation operation, std::shared_ptr<const File> file, char* data, uint64_t length,
             uint64_t offset, uint64_t key, std::shared_ptr<Checksums> checksums, DeviceTarget device);

    Operation operation() const { return operation_; }
    const File& file() const { return *file_; }                // until it is over
    const std::string& path() const { return file_->path(); }  // likewise
    uint64_t length() const { return length_; }
    uint64_t offset() const { return offset_; }
    uint64_t key() const { return key_; }
    Checksums* checksums() const { return checksums_.get(); }

    bool done() const { return state_.load(std::memory_order_acquire) != kPending; }
    bool failed() const { return state_.load(std::memory_order_acquire) == kFailed; }
    // Waits at most `timeout_ms`; returns `done()`.
    bool wait(int64_t timeout_ms) const;
    // Bytes moved, always `length()`. Throws the IoError of a failed transfer. Only once `done()`.
    uint64_t result() const;
    // Only once `failed()`.
    const IoError& error() const { return *error_; }
    // When its first bytes were given to the backend, and when its last were done, which is not when somebody
    // looked. The same where nothing was to be moved. Only once `done()`.
    std::chrono::steady_clock::time_point begun() const { return begun_; }
    std::chrono::steady_clock::time_point ended() const { return ended_; }

  private:
    friend class TransferQueue;
    static constexpr uint32_t kPending = 0;
    static constexpr uint32_t kComplete = 1;
    static constexpr uint32_t kFailed = 2;

    void complete();  // wakes whoever waits; nothing may be in flight any more

    const Operation operation_;
    std::shared_ptr<const File> file_;  // until its last part is over, or a deleted file would stay open
    char* const data_;
    const uint64_t length_;
    const uint64_t offset_;
    const uint64_t key_;
    const std::shared_ptr<Checksums> checksums_;  // may be null
    DeviceTarget device_;  // without a file: memory of the host. Until its last part is over, as `file_`

    // The queue's, under its mutex. Bytes before `cut_` have been given out as parts, `parts_` of which are
    // not over.
    uint64_t cut_ = 0;
    uint32_t parts_ = 0;
    std::optional<IoError> error_;
    std::chrono::steady_clock::time_point begun_;
    std::chrono::steady_clock::time_point ended_;

    std::atomic<uint32_t> state_{kPending};
};

}  // namespace swapper
