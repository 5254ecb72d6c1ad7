// A thread that moves parts of transfers, with a backend of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend.h"
#include "error.h"
#include "transfer_queue.h"

namespace swapper {

std::unique_ptr<Backend> make_backend(BackendKind kind, uint32_t queue_depth);

class IoThread {
  public:
    // Throws IoError where the backend is not to be had, or no thread. `index`: of the queue's threads.
    IoThread(TransferQueue& queue, uint64_t index);
    ~IoThread() { join(); }
    IoThread(const IoThread&) = delete;
    IoThread& operator=(const IoThread&) = delete;

    void join() {
        if (thread_.joinable()) thread_.join();
    }

    // Under the queue's mutex, which keeps the backend from going away meanwhile.
    void wake() {
        if (!ended_) backend_->wake();
    }

    // There is something new in the queue. One system call for many transfers: a thread that is awake, or has
    // no room, comes to the queue by itself. Under the queue's mutex.
    void offer() {
        if (!wants_parts_) return;
        wants_parts_ = false;
        wake();
    }

    // Under the queue's mutex.
    bool ended() const { return ended_; }

  private:
    void run(std::promise<void> started);

    // Takes parts from the queue. False when there is nothing left to do, ever.
    bool fill();
    void submit();
    void reap();
    // Opens the file of `part` if it was closed: here, as it may take long. Returns why it could not.
    static std::optional<IoError> open_for(Part& part);
    // Lets the rest of `part` go through the page cache, from the next submission on.
    static void go_buffered(Part& part);
    // Allocated by the I/O thread, not under the mutex; kept for the next part that needs one. False where
    // there is no memory.
    bool prepare_bounce(Part& part);
    // Whether there were checksums to note, before the kernel gets the bytes.
    static bool note_checksums(Part& part);
    // All bytes of `part` have moved.
    void complete(Part& part);
    // A request of `part` is over: go on with the rest of the part, or end it.
    void advance(Part& part, int64_t result);
    static IoError failure(const Part& part, int error, std::string detail);
    void finish(Part& part, std::optional<IoError> error);
    // The thread ends, in order or because its backend broke.
    void end(const std::optional<IoError>& failure);

    TransferQueue& queue_;
    const uint64_t index_;
    std::unique_ptr<Backend> backend_;
    bool ended_ = false;        // under the queue's mutex
    bool wants_parts_ = false;  // likewise: it waits, with room for parts that are not there yet
    std::vector<Part> parts_;
    std::vector<Part*> free_;
    std::deque<Part*> ready_;  // to be submitted, in this order
    size_t in_flight_ = 0;
    uint32_t starved_ = 0;
    uint32_t backoff_ms_ = 0;
    uint64_t generation_ = 0;
    size_t bounces_ = 0;
    std::vector<Block> spare_blocks_;
    std::vector<Request*> batch_;
    std::vector<Completion> completions_;
    std::thread thread_;
};

}  // namespace swapper
