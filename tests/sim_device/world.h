// All that is simulated, under one lock.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace sim {

struct World {
    Scheduler scheduler;
    DeviceMemory memory{scheduler};
    HostMemory host{scheduler, memory};
};

// Access to the world for as long as it lives. Kernels run under the lock: they call nothing of this folder,
// and take no lock of Python's.
class Entered {
  public:
    // Throws std::runtime_error in a child of the process that began with it: the streams are the parent's.
    Entered();
    ~Entered();
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;
    World* operator->() const { return &world_; }
    World& operator*() const { return world_; }

  private:
    std::unique_lock<std::mutex> lock_;
    World& world_;
};

// True in a child of the process that began with it, where memory is given back to nobody.
bool is_forked() noexcept;

// True once the world is made.
bool has_begun() noexcept;

// Where the bytes of an address of a device are. Needs no lock: that never changes.
void* device_bytes(const void* address);

// Streams by number; those from 0 to kDevices - 1 are the default ones of the devices.
int current_device() noexcept;
int exchange_device(int device) noexcept;            // negative: stays. Returns the former one
int exchange_device_if_in_use(int device) noexcept;  // as the end of a guard
int current_stream(int device) noexcept;             // negative: of the current device
int exchange_stream(int stream, int device) noexcept;

// [Note: contexts] As in CUDA 12, a process has a context, which takes memory, on each device that memory was
// allocated on, that was made the current one of a thread (but by the end of a guard, which only notes it, if
// there is no context yet), or that was the driver's current one of a thread that asked for an event. The
// driver's is the first device in a thread that begins.
std::vector<int64_t> contexts();
void forget_contexts() noexcept;
void note_context(int device) noexcept;  // negative: on the driver's current one

// Throws std::runtime_error if a kernel has failed since the last call.
void raise_failure(World& world);

}  // namespace sim
