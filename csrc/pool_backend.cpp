#include "pool_backend.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "error.h"

namespace swapper {
namespace {

// Each blocks in one call; more than this only adds stacks and context switches at 1 MiB a request.
constexpr uint32_t kMaxThreads = 8;

class PoolBackend final : public Backend {
  public:
    PoolBackend(uint32_t queue_depth, Perform perform) : perform_(perform) {
        const uint32_t count = std::min(queue_depth, kMaxThreads);
        threads_.reserve(count);
        finished_.reserve(queue_depth);
        try {
            for (uint32_t i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
        } catch (const std::system_error& error) {
            // Some threads are enough; none is a failure.
            if (threads_.empty()) throw IoError(error.code().value(), "start I/O threads");
        } catch (const std::bad_alloc&) {
            if (threads_.empty()) throw;
        }
    }

    ~PoolBackend() override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        submitted_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    size_t submit(Request* const* requests, size_t count) override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            waiting_.insert(waiting_.end(), requests, requests + count);
        }
        if (count == 1) {
            submitted_.notify_one();
        } else {
            submitted_.notify_all();
        }
        return count;
    }

    size_t reap(Completion* completions, size_t capacity, bool block) override {
        std::unique_lock<std::mutex> lock(mutex_);
        if (block) completed_.wait(lock, [this] { return woken_ || !finished_.empty(); });
        woken_ = false;
        const size_t count = std::min(capacity, finished_.size());
        const auto end = finished_.begin() + static_cast<std::ptrdiff_t>(count);
        std::copy(finished_.begin(), end, completions);
        finished_.erase(finished_.begin(), end);
        return count;
    }

    void wake() override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            woken_ = true;
        }
        completed_.notify_one();
    }

    int set_pieces(const std::vector<Piece>& pieces) override { return pieces.empty() ? 0 : EOPNOTSUPP; }

  private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            submitted_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            Request* request = waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            const Completion completion{request, perform_(*request)};
            lock.lock();
            finished_.push_back(completion);
            completed_.notify_one();
        }
    }

    const Perform perform_;
    std::mutex mutex_;
    std::condition_variable submitted_;
    std::condition_variable completed_;
    std::deque<Request*> waiting_;
    std::vector<Completion> finished_;  // has room for all, so that no thread can fail at adding one
    bool woken_ = false;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_pool_backend(uint32_t queue_depth, Perform perform) {
    return std::make_unique<PoolBackend>(queue_depth, perform);
}

}  // namespace swapper
