// Failures on purpose, for tests.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "backend.h"

namespace swapper {

// What goes wrong, and how often. Probabilities are per request to the operating system, 0 to 1, drawn from
// `seed`. The atomic fields may be changed and read from any thread while an engine uses the plan.
struct FaultPlan {
    uint64_t seed = 0;
    double short_transfer = 0;  // fewer bytes are moved than asked
    double eio = 0;
    double enospc = 0;  // writes only
    double eintr = 0;
    double eagain = 0;
    double einval = 0;      // on descriptors with O_DIRECT only
    double full = 0;        // per call: no request is taken
    uint32_t delay_us = 0;  // completions are held up to this long
    bool reorder = false;   // completions come in random order

    // At most so fast, as a drive that does one request after another: a completion is held until all that
    // was submitted before it, and itself, would have been moved at this rate, by the steady clock. Counted
    // by what each request asks for, also one that fails, over all threads of the engine. 0: no limit, and
    // what is held is over.
    std::atomic<uint64_t> bytes_per_second{0};
    std::atomic<int64_t> busy_until_ns{0};  // that drive, by the steady clock

    // The n-th read or write request from now on, counted from 1, fails with `fail_error`; 0 for none.
    // Counted over all threads of the engine; retries and the parts of one transfer count singly.
    std::atomic<int64_t> fail_read_at{0};
    std::atomic<int64_t> fail_write_at{0};
    std::atomic<int> fail_error{5};  // EIO

    std::atomic<int64_t> reads{0};  // requests seen
    std::atomic<int64_t> writes{0};
};

// Decorates `inner`. `instance` makes the random numbers of each I/O thread its own.
std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan,
                                            uint64_t instance);

}  // namespace swapper
