// How an engine moves bytes.
#pragma once

#include <cstdint>
#include <memory>

#include "backend.h"
#include "fault_backend.h"

namespace swapper {

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

}  // namespace swapper
