// Memory of the devices, and page-locked memory of the host.
//
// Addresses of device memory are of a range without any access; its bytes are at a fixed distance, which only
// this folder knows. So the host crashes wherever it touches device memory, and nothing ever has to be
// protected anew.
//
// Memory that was freed is poisoned as soon as the work that may use it is over, as a caching allocator
// counts that: all that its own stream has to do by then, and the streams that were recorded. It is given out
// again late, so that a copy that comes later still is found to have written to it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "streams.h"

namespace sim {

constexpr int kDevices = 2;
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating type

class DeviceMemory {
  public:
    explicit DeviceMemory(Scheduler& scheduler);
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory();

    // nullptr if that is more than the limit.
    void* allocate(size_t length, int device, int stream);
    void free(void* address);
    // `stream` uses the memory too: it is not reused before all that the stream has to do when it is freed.
    void record(void* address, int stream);

    void* bytes(const void* address) const;  // throws std::runtime_error if it is not of a device
    int device_of(const void* address) const;

    // Poisons what was freed and is not used any more.
    void reap();
    // What went wrong since the last call. All freed memory that was poisoned is looked at.
    std::vector<std::string> take_violations();
    void note(std::string violation) { violations_.push_back(std::move(violation)); }

    struct Device {
        size_t allocated = 0, peak = 0, limit = size_t{16} << 30;
        size_t next = 0;  // offset of the addresses that were never used
    };
    Device& device(int number) { return devices_.at(static_cast<size_t>(number)); }

    bool poison_now =
        false;  // free waits for the stream that the memory is of, so that it is poisoned at once

  private:
    struct Block {
        size_t length;
        int device, stream;
        std::set<int> recorded;
    };
    struct Freed {
        char* address;
        Block block;
        std::vector<Mark> after;
    };

    void poison(const Freed& freed);
    void look_at_oldest();

    Scheduler& scheduler_;
    char* addresses_ = nullptr;
    char* bytes_ = nullptr;
    std::array<Device, kDevices> devices_;
    std::map<const char*, Block> blocks_;
    std::deque<Freed> freed_;       // still in use
    std::deque<Freed> quarantine_;  // poisoned
    size_t freed_length_ = 0, quarantine_length_ = 0;
    std::map<std::pair<int, size_t>, std::vector<char*>> free_;  // by device and length; poisoned
    std::vector<std::string> violations_;
};

class HostMemory {
  public:
    HostMemory(Scheduler& scheduler, DeviceMemory& device) : scheduler_(scheduler), device_(device) {}

    void* allocate(size_t length);  // page-locked; throws std::bad_alloc
    void free(void* address);       // the copies that use it go on
    void lock(const void* address, size_t length);
    void unlock(const void* address);
    bool is_locked(const void* address) const;

  private:
    void free_unused();

    Scheduler& scheduler_;
    DeviceMemory& device_;
    std::map<const char*, size_t> locked_;
    std::vector<HostRange> freed_;  // still in use
};

}  // namespace sim
