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
#pragma once

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

enum class Mode { eager, random, lazy };

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
};

class Scheduler {
  public:
    void configure(Mode mode, uint64_t seed, double max_delay_us);

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

  private:
    struct Queued {
        Task task;
        double due_us;
    };
    struct Stream {
        int device = 0;
        std::deque<Queued> queue;
        uint64_t done = 0;
        double last_due_us = 0;
    };

    bool is_due(const Stream& stream) const;
    void queue(Stream& stream, Task task, double delay_us);
    void run_next(Stream& stream);

    std::vector<Stream> streams_;
    Mode mode_ = Mode::eager;
    double max_delay_us_ = 0;
    std::mt19937_64 random_{0};
    double now_us_ = 0;
    std::map<std::pair<int, uint64_t>, int> polls_;  // of each mark, since something was pushed
    uint64_t done_ = 0;
    std::string failure_;
    std::vector<std::function<void()>> spent_;
};

}  // namespace sim
