#include "streams.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <stdexcept>
#include <utility>

namespace sim {
namespace {

constexpr double kCallUs = 10;
constexpr int kPolls = 32;
constexpr double kNever = std::numeric_limits<double>::infinity();

bool overlap(HostRange a, HostRange b) {
    return a.length > 0 && b.length > 0 && a.start < b.start + b.length && b.start < a.start + a.length;
}

}  // namespace

void Scheduler::configure(Mode mode, uint64_t seed, double max_delay_us) {
    for (int stream = 0; stream < stream_count(); ++stream) wait(mark(stream));
    mode_ = mode;
    random_.seed(seed);
    max_delay_us_ = max_delay_us;
    for (Stream& stream : streams_) stream.last_due_us = now_us_;
}

int Scheduler::add_stream(int device) {
    streams_.emplace_back().device = device;
    return stream_count() - 1;
}

void Scheduler::push(int number, Task task) {
    double delay_us = 0;
    if (mode_ == Mode::random) {
        const uint64_t drawn = random_();
        const double share = static_cast<double>(drawn >> 1) * 0x1p-63;
        if ((drawn & 1) != 0) delay_us = max_delay_us_ * share;
    }
    queue(streams_.at(static_cast<size_t>(number)), std::move(task), delay_us);
    polls_.clear();
    tick();
}

void Scheduler::append(int number, Task task) {
    queue(streams_.at(static_cast<size_t>(number)), std::move(task), 0);
}

void Scheduler::queue(Stream& stream, Task task, double delay_us) {
    if (mode_ == Mode::timed) {
        stream.queue.push_back({std::move(task), now_us_});
        return;
    }
    const bool is_lazy = mode_ == Mode::lazy;
    const double due_us = is_lazy ? kNever : std::max(now_us_, stream.last_due_us) + task.takes_us + delay_us;
    stream.last_due_us = due_us;
    stream.queue.push_back({std::move(task), due_us});
}

Mark Scheduler::mark(int number) const {
    const Stream& stream = streams_.at(static_cast<size_t>(number));
    return {number, stream.done + stream.queue.size()};
}

bool Scheduler::reached(Mark mark) const {
    return streams_.at(static_cast<size_t>(mark.stream)).done >= mark.position;
}

bool Scheduler::is_due(const Stream& stream) const {
    if (stream.queue.empty()) return false;
    const Queued& next = stream.queue.front();
    return next.due_us <= now_us_ && (!next.task.after || reached(*next.task.after));
}

void Scheduler::tick() {
    if (mode_ == Mode::timed) {
        pass(speeds_.call_us);
        return;
    }
    now_us_ += kCallUs;
    for (bool moved = true; moved;) {
        moved = false;
        for (Stream& stream : streams_) {
            while (is_due(stream)) {
                run_next(stream);
                moved = true;
            }
        }
    }
}

bool Scheduler::poll(Mark mark) {
    if (mode_ == Mode::timed) {
        pass(speeds_.call_us / 10);
        return reached(mark);
    }
    const bool was_reached = reached(mark);
    tick();
    if (!was_reached && !reached(mark) && ++polls_[{mark.stream, mark.position}] > kPolls) {
        const Stream& stream = streams_.at(static_cast<size_t>(mark.stream));
        wait({mark.stream, stream.done + 1 + (mark.position - stream.done) / 4});
    }
    return was_reached;
}

// Streams wait for marks that are older than the wait itself, so this recurses once for each stream at most.
void Scheduler::wait(Mark mark) {
    if (mode_ == Mode::timed) {
        wait_timed(mark);
        return;
    }
    const auto number = static_cast<size_t>(mark.stream);
    while (streams_.at(number).done < mark.position) {
        if (const auto after = streams_[number].queue.front().task.after) wait(*after);
        run_next(streams_[number]);
    }
}

void Scheduler::run_next(Stream& stream) {
    Queued next = std::move(stream.queue.front());
    stream.queue.pop_front();
    // What runs in the mode "lazy" has no time of its own: it takes what it takes, from now on.
    if (next.due_us == kNever) {
        now_us_ += next.task.takes_us;
    } else if (mode_ != Mode::timed) {
        now_us_ = std::max(now_us_, next.due_us);
    }
    try {
        const bool can_fail = next.task.engine != Engine::none && next.task.engine != Engine::drive;
        if (can_fail && ++ran_ == fails_at_) throw std::runtime_error("it was told to fail");
        if (next.task.work) next.task.work();
    } catch (const std::exception& error) {
        if (failure_.empty()) failure_ = std::string(next.task.name) + ": " + error.what();
        failure_.resize(
            std::min(failure_.size(), failure_.find("\nException raised from")));  // torch's backtrace
    }
    if (next.task.work) spent_.push_back(std::move(next.task.work));
    ++stream.done;
    ++done_;
}

int64_t Scheduler::fail_at(int64_t n) {
    fails_at_ = n;
    return std::exchange(ran_, 0);
}

std::string Scheduler::take_failure() {
    return std::exchange(failure_, {});
}

bool Scheduler::finish(HostRange range) {
    bool found = false;
    for (int number = 0; number < stream_count(); ++number) {
        const Stream& stream = streams_[static_cast<size_t>(number)];
        uint64_t position = 0;
        for (size_t i = 0; i < stream.queue.size(); ++i) {
            if (overlap(stream.queue[i].task.host, range)) position = stream.done + i + 1;
        }
        found |= position > 0;
        wait({number, position});
    }
    return found;
}

bool Scheduler::uses(HostRange range) const {
    for (const Stream& stream : streams_) {
        for (const Queued& queued : stream.queue) {
            if (overlap(queued.task.host, range)) return true;
        }
    }
    return false;
}

}  // namespace sim
