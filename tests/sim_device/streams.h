// Streams of work that runs late, without threads: whoever waits, polls or starts more work runs what is due.
//
// [Note: no threads] Work that no thread runs by itself is late by design, not by luck, and one seed is one
// schedule. What a device does while the host computes is seen by the host only in memory, and there any
// moment of it equals one just before a call: so it is enough to run work at calls.
//
// Time is counted, not measured: each call takes `kCallUs`, and who waits lets it jump to what it waits for.
// A piece of work may run by itself from a time on that the mode sets:
//
//     eager    when all before it in its stream has run
//     random   half of the pieces then, the others up to `max_delay_us` later, drawn from the seed
//     lazy     never: only when somebody waits for it, or polls
//
// [Note: the clock] In the mode "timed" work takes a set time instead, so that what a program takes on a
// device of given speeds can be told to the microsecond, on any machine. Copies have one engine for each
// direction, kernels one for all, and so has a drive, which is told of its transfers from outside: each does
// one piece at a time, in the order in which pieces could begin. Other work (events, waits, `sleep`) needs
// none. A piece begins when the one before it in its stream is over, what it waits for is reached, and its
// engine is free. The host takes `call_us` for each call and a tenth of that to poll; what it computes
// between calls is not counted. All threads of the host are one: it is for programs of which one computes
// while the others wait for it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace sim {

enum class Mode { eager, random, lazy, timed };

// What does one piece of work at a time in the mode "timed".
enum class Engine { none, kernels, up, down, drive };
constexpr size_t kEngines = 5;

// Of the device and the host in the mode "timed".
struct Speeds {
    double call_us = 0;    // of the host, for each call
    double kernel_us = 0;  // of each kernel, besides the longer of what its bytes and its operations take
    double bytes_per_us = 1, operations_per_us = 1;  // of kernels
    double up_per_us = 1, down_per_us = 1;           // bytes of copies from and to the host

    double of_copy_us(Engine engine, size_t length) const {
        const double per_us = engine == Engine::up     ? up_per_us
                              : engine == Engine::down ? down_per_us
                                                       : bytes_per_us;
        return static_cast<double>(length) / per_us;
    }
    double of_kernel_us(size_t length, double operations) const {
        return kernel_us +
               std::max(static_cast<double>(length) / bytes_per_us, operations / operations_per_us);
    }
};

// Everything that was pushed to `stream` before a moment.
struct Mark {
    int stream = 0;
    uint64_t position = 0;
};

struct HostRange {
    const char* start = nullptr;
    size_t length = 0;
};

struct Task {
    std::function<void()> work;
    std::optional<Mark> after;  // of another stream: it is reached first
    HostRange host;             // memory of the host that the work reads or writes late
    double takes_us = 0;        // of the counted time
    const char* name = "";      // for errors
    Engine engine = Engine::none;
};

class Scheduler {
  public:
    void configure(Mode mode, uint64_t seed, double max_delay_us);

    // From now on in the mode "timed".
    void keep_time(const Speeds& speeds);
    // nullptr in other modes.
    const Speeds* speeds() const { return mode_ == Mode::timed ? &speeds_ : nullptr; }

    int add_stream(int device);
    int device_of(int stream) const { return streams_.at(static_cast<size_t>(stream)).device; }
    int stream_count() const { return static_cast<int>(streams_.size()); }

    void push(int stream, Task task);
    // The same, for what takes no call, and so no time. It comes right after what is before it in its stream.
    void append(int stream, Task task);
    Mark mark(int stream) const;
    bool reached(Mark mark) const;

    // Runs what is due by itself. Time passes.
    void tick();
    // True if it was reached by now. Who polls again and again, and does nothing else, gets there.
    bool poll(Mark mark);
    // Runs all that is needed to reach it, and nothing else.
    void wait(Mark mark);

    // Lets the n-th kernel or copy that runs from now on fail, counted from 1: it does nothing but that. 0:
    // none does. Returns how many have run since the last call.
    int64_t fail_at(int64_t n);

    // The first failure of a kernel that ran late, once; empty if there was none.
    std::string take_failure();

    // The work that has run since the last call. To be destroyed without the lock of the world: it may hold
    // the last reference to a tensor of Python's, which takes Python's lock.
    std::vector<std::function<void()>> take_spent() { return std::exchange(spent_, {}); }

    // Runs all that uses it, and returns whether there was anything.
    bool finish(HostRange range);
    bool uses(HostRange range) const;
    uint64_t done() const { return done_; }  // pieces of work in all
    double now_us() const { return now_us_; }
    // When the work that runs now does so.
    double work_us() const { return mode_ == Mode::timed ? event_us_ : now_us_; }
    // In the mode "timed": for how long the host has waited, and an engine worked.
    double waited_us() const { return waited_us_; }
    double busy_us(Engine engine) const { return busy_us_[static_cast<size_t>(engine)]; }

  private:
    struct Queued {
        Task task;
        double due_us;  // in the mode "timed", when it was pushed
        // In the mode "timed", when it could begin, and when it is over. Negative: not known yet.
        double ready_us = -1, over_us = -1;
    };
    struct Stream {
        int device = 0;
        std::deque<Queued> queue;
        uint64_t done = 0;
        double last_due_us = 0;  // in the mode "timed", when the last piece was over
    };

    bool is_due(const Stream& stream) const;
    void queue(Stream& stream, Task task, double delay_us);
    void run_next(Stream& stream);

    // In the mode "timed" (clock.cpp): does what happens next, if that is before `until_us`.
    bool happen(double until_us);
    void pass(double us);
    void wait_timed(Mark mark);

    std::vector<Stream> streams_;
    Mode mode_ = Mode::eager;
    double max_delay_us_ = 0;
    std::mt19937_64 random_{0};
    double now_us_ = 0;
    std::map<std::pair<int, uint64_t>, int> polls_;  // of each mark, since something was pushed
    uint64_t done_ = 0;
    std::string failure_;
    int64_t fails_at_ = 0, ran_ = 0;  // kernels and copies
    std::vector<std::function<void()>> spent_;

    Speeds speeds_;
    double event_us_ = 0, waited_us_ = 0;
    std::array<double, kEngines> free_us_{}, busy_us_{};
};

}  // namespace sim
