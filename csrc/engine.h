// Turns reads and writes of any size into requests, and requests back into one completion. All policy is
// here.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "checksums.h"
#include "cufile.h"
#include "error.h"
#include "fault_backend.h"
#include "file.h"
#include "pinned.h"

namespace swapper {

// One asynchronous read or write. Shared by the caller and the engine, so either may let go first; the memory
// is the caller's and must stay until `done()`. Has no thread or lock of its own, so that a forked child can
// destroy what it inherited.
class Transfer {
  public:
    Transfer(Operation operation, std::shared_ptr<const File> file, char* data, uint64_t length,
             uint64_t offset, uint64_t key, std::shared_ptr<Checksums> checksums, DeviceTarget device);

    Operation operation() const { return operation_; }
    const std::string& path() const { return file_->path(); }  // of the file, which it has until it is over
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
    friend class Engine;
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

    // The engine's, under its mutex. Bytes before `cut_` have been given out as parts, `parts_` of which are
    // not over.
    uint64_t cut_ = 0;
    uint32_t parts_ = 0;
    std::optional<IoError> error_;
    std::chrono::steady_clock::time_point begun_;
    std::chrono::steady_clock::time_point ended_;

    std::atomic<uint32_t> state_{kPending};
};

struct EngineOptions {
    BackendKind backend = BackendKind::kThreads;
    uint64_t block_bytes = uint64_t{1}
                           << 20;       // the most that one request moves; 4096 to 1 GiB, a multiple of 4096
    uint32_t queue_depth = 32;          // requests in flight, per thread
    uint32_t threads = 1;               // I/O threads, each with a backend of its own
    bool single_submit = false;         // one request per system call instead of a batch
    bool overlap_events = true;         // false: a batch is over before the next is submitted
    std::shared_ptr<FaultPlan> faults;  // may be null
};

// Owns the I/O threads. Transfers start in the order of `start` and run side by side; those that overlap in a
// file are not ordered against each other. Every method but the destructor may be called from any thread, and
// none submits to the kernel on it. In a forked child every method throws StateError and the destructor does
// nothing.
class Engine {
  public:
    // Throws IoError where the backend is not to be had.
    explicit Engine(const EngineOptions& options);
    ~Engine();  // closes
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // `key` is the caller's, to know the transfer by in `take_finished`; 0: it is not to be there. A length
    // of 0 is done on return. With `checksums` a write sets them and a read is checked against them, on the
    // I/O threads; a read that does not match fails with EBADMSG and the offset of the block. Throws
    // std::invalid_argument unless `offset` is the start of one of their blocks, those divide `block_bytes`,
    // and they reach far enough.
    std::shared_ptr<Transfer> start(Operation operation, std::shared_ptr<const File> file, char* data,
                                    uint64_t length, uint64_t offset, uint64_t key = 0,
                                    std::shared_ptr<Checksums> checksums = nullptr);

    // `start` for device memory, with the cuFile backend. Throws std::invalid_argument unless `offset` and
    // `length` are multiples of the file's `offset_alignment`: cuFile would read and write back the rest of a
    // page, and undo what another transfer writes there.
    std::shared_ptr<Transfer> start_on_device(Operation operation, DeviceTarget device, char* data,
                                              uint64_t length, uint64_t offset);

    // Transfers with a key that are done, each returned once.
    std::vector<std::shared_ptr<Transfer>> take_finished();

    // Registers what is ready of the slab with the kernel, in pieces, so that it need not map pages at each
    // request; to be called again when more of it is ready. Waits for what is in flight. Keeps the slab alive
    // until `unregister_slab` or `close`. Returns "" or the reason why this could not be done; transfers work
    // all the same.
    std::string register_slab(std::shared_ptr<Slab> slab);
    void unregister_slab(const Slab* slab);

    // Whether a backend has failed, so that every `start` throws.
    bool broken() const;

    // Drains what is in flight and ends the threads. Idempotent. Later `start` throws StateError.
    void close();

  private:
    struct Impl;
    class Worker;
    Impl& checked() const;
    std::shared_ptr<Transfer> enqueue(std::shared_ptr<Transfer> transfer);
    std::unique_ptr<Impl> impl_;
};

// Whether this system offers a backend, tried for real. Returns "" or the reason why not. `fixed`: whether
// io_uring also registers memory.
std::string probe_backend(BackendKind kind, bool fixed);

}  // namespace swapper
