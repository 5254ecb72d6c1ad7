#include "fault_backend.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <list>
#include <random>
#include <thread>

namespace swapper {
namespace {

using Clock = std::chrono::steady_clock;

class FaultBackend final : public Backend {
  public:
    FaultBackend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan, uint64_t instance)
        : inner_(std::move(inner)), plan_(std::move(plan)), random_(plan_->seed * 1000003 + instance) {}

    size_t submit(Request* const* requests, size_t count) override {
        if (chance(plan_->full)) return 0;
        // One at a time: a request that is refused by `inner` must not have been counted.
        for (size_t i = 0; i < count; ++i) {
            if (!submit_one(requests[i])) return i;
        }
        return count;
    }

    size_t reap(Completion* completions, size_t capacity, bool block) override {
        for (;;) {
            Completion inner_done[16];
            const size_t count = inner_->reap(inner_done, 16, block && held_.empty());
            for (size_t i = 0; i < count; ++i) finish(inner_done[i]);
            const size_t emitted = emit(completions, capacity);
            if (emitted > 0 || !block || held_.empty()) return emitted;
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

    void wake() override { inner_->wake(); }
    int set_pieces(const std::vector<Piece>& pieces) override { return inner_->set_pieces(pieces); }

  private:
    struct Passed {  // what `inner` sees in place of `outer`
        Request inner;
        Request* outer;
        uint32_t reported;        // at most this many bytes are admitted to have moved
        Clock::time_point moved;  // see Held
    };
    struct Held {
        Completion completion;
        Clock::time_point due;
        Clock::time_point moved;  // by a drive of the plan's speed, as long as it has one
    };

    bool chance(double probability) {
        return probability > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < probability;
    }

    // Whether this was the one that is counted to. It stays at 0 then: several I/O threads count at once.
    static bool count_down(std::atomic<int64_t>& left) {
        int64_t before = left.load();
        while (before > 0 && !left.compare_exchange_weak(before, before - 1)) {
        }
        return before == 1;
    }

    int drawn_error(const Request& request) {
        const bool read = request.operation == Operation::kRead;
        auto& seen = read ? plan_->reads : plan_->writes;
        auto& fail_at = read ? plan_->fail_read_at : plan_->fail_write_at;
        ++seen;
        if (count_down(fail_at)) return plan_->fail_error;
        if (chance(plan_->eio)) return EIO;
        if (!read && chance(plan_->enospc)) return ENOSPC;
        if (chance(plan_->eintr)) return EINTR;
        if (chance(plan_->eagain)) return EAGAIN;
        if (chance(plan_->einval) && (::fcntl(request.fd, F_GETFL) & O_DIRECT) != 0) return EINVAL;
        return 0;
    }

    bool submit_one(Request* request) {
        if (const int error = drawn_error(*request); error != 0) {
            hold({request, -error}, when_moved(request->length));
            return true;
        }
        Passed& passed = passed_.emplace_back(Passed{*request, request, request->length, {}});
        if (request->length > 1 && chance(plan_->short_transfer)) {
            passed.reported = std::uniform_int_distribution<uint32_t>(1, request->length - 1)(random_);
            // Keeps what O_DIRECT asks of lengths, wherever the request itself did.
            passed.inner.length = std::min((passed.reported + 4095) / 4096 * 4096, request->length);
        }
        Request* inner = &passed.inner;
        if (inner_->submit(&inner, 1) != 1) {
            passed_.pop_back();
            return false;
        }
        passed.moved = when_moved(request->length);
        return true;
    }

    // When a drive of the plan's speed would have moved `length` more bytes.
    Clock::time_point when_moved(uint32_t length) {
        const auto now = Clock::now();
        const uint64_t rate = plan_->bytes_per_second.load();
        if (rate == 0) return now;
        using std::chrono::nanoseconds;
        const auto needed_ns = static_cast<int64_t>(uint64_t{1000000000} * length / rate);
        const int64_t now_ns = std::chrono::duration_cast<nanoseconds>(now.time_since_epoch()).count();
        int64_t busy_ns = plan_->busy_until_ns.load();
        int64_t done_ns = 0;
        do {
            done_ns = std::max(busy_ns, now_ns) + needed_ns;
        } while (!plan_->busy_until_ns.compare_exchange_weak(busy_ns, done_ns));
        return Clock::time_point(std::chrono::duration_cast<Clock::duration>(nanoseconds(done_ns)));
    }

    void finish(const Completion& completion) {
        const auto at = std::find_if(passed_.begin(), passed_.end(), [&](const Passed& passed) {
            return &passed.inner == completion.request;
        });
        const Request& outer = *at->outer;
        int64_t result = completion.result;
        if (result > at->reported) {
            result = at->reported;
            // Whoever believes that the rest arrived shall see that it did not.
            if (outer.operation == Operation::kRead && outer.device == nullptr) {
                std::memset(outer.data + result, 0xAB, outer.length - static_cast<size_t>(result));
            }
        }
        hold({at->outer, result}, at->moved);
        passed_.erase(at);
    }

    void hold(const Completion& completion, Clock::time_point moved) {
        auto due = Clock::now();
        if (plan_->delay_us > 0) {
            due += std::chrono::microseconds(
                std::uniform_int_distribution<uint32_t>(0, plan_->delay_us)(random_));
        }
        held_.push_back({completion, due, moved});
    }

    size_t emit(Completion* completions, size_t capacity) {
        // To come in another order there must be two: wait for a second one while any is on its way.
        if (plan_->reorder && held_.size() < 2 && !passed_.empty()) return 0;
        if (plan_->reorder) std::shuffle(held_.begin(), held_.end(), random_);
        const auto now = Clock::now();
        const bool capped = plan_->bytes_per_second != 0;
        size_t count = 0;
        for (auto at = held_.begin(); at != held_.end() && count < capacity;) {
            if (at->due > now || (capped && at->moved > now)) {
                ++at;
                continue;
            }
            completions[count++] = at->completion;
            at = held_.erase(at);
        }
        return count;
    }

    std::list<Passed> passed_;        // addresses are stable
    std::unique_ptr<Backend> inner_;  // goes before them: after a failure it still completes what was passed
    std::shared_ptr<FaultPlan> plan_;
    std::mt19937_64 random_;
    std::vector<Held> held_;
};

}  // namespace

std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan,
                                            uint64_t instance) {
    return std::make_unique<FaultBackend>(std::move(inner), std::move(plan), instance);
}

}  // namespace swapper
