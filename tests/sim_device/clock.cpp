#include <algorithm>
#include <limits>
#include <tuple>

#include "streams.h"

// The mode "timed": see [Note: the clock].
namespace sim {

void Scheduler::keep_time(const Speeds& speeds) {
    configure(Mode::timed, 0, 0);
    speeds_ = speeds;
    event_us_ = now_us_;
    waited_us_ = 0;
    free_us_.fill(now_us_);
    busy_us_.fill(0);
}

// Pieces begin and end in the order of time. So all that could become ready before one that begins has done
// so, except what the host will push: it never begins before the host's time.
bool Scheduler::happen(double until_us) {
    Stream* next = nullptr;
    std::tuple<double, bool, double> first{std::numeric_limits<double>::infinity(), true, 0};
    for (Stream& stream : streams_) {
        if (stream.queue.empty()) continue;
        Queued& queued = stream.queue.front();
        const bool begins = queued.over_us < 0;
        if (begins && queued.ready_us < 0) {
            if (queued.task.after && !reached(*queued.task.after)) continue;
            queued.ready_us = std::max({queued.due_us, stream.last_due_us, event_us_});
        }
        const size_t engine = static_cast<size_t>(queued.task.engine);
        const double at_us = begins ? std::max(queued.ready_us, free_us_[engine]) : queued.over_us;
        // What ends comes before what begins at that time, and what has waited longer before the other.
        const std::tuple<double, bool, double> order{at_us, begins, queued.ready_us};
        if (order < first) {
            first = order;
            next = &stream;
        }
    }
    if (next == nullptr || std::get<0>(first) > until_us) return false;
    event_us_ = std::get<0>(first);
    Queued& queued = next->queue.front();
    if (queued.over_us >= 0) {
        next->last_due_us = queued.over_us;
        run_next(*next);
        return true;
    }
    const auto engine = static_cast<size_t>(queued.task.engine);
    queued.over_us = event_us_ + queued.task.takes_us;
    if (queued.task.engine != Engine::none) {
        free_us_[engine] = queued.over_us;
        busy_us_[engine] += queued.task.takes_us;
    }
    return true;
}

void Scheduler::pass(double us) {
    now_us_ += us;
    while (happen(now_us_)) continue;
}

void Scheduler::wait_timed(Mark mark) {
    const double since_us = now_us_;
    while (!reached(mark) && happen(std::numeric_limits<double>::infinity()))
        now_us_ = std::max(now_us_, event_us_);
    waited_us_ += now_us_ - since_us;
    pass(speeds_.call_us / 10);
}

}  // namespace sim
