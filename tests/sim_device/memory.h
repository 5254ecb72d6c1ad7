// Memory of the devices, and page-locked memory of the host.
//
// Addresses of device memory are of a range without any access; its bytes are at a fixed distance, which only
// this folder knows. So the host crashes wherever it touches device memory, and nothing ever has to be
// protected anew.
//
// [Note: whose memory] As with the caching allocator of CUDA, a block that is freed is at once free for the
// stream that it was allocated on, which may be given it again while work that was queued earlier still uses
// it. Of a block that was recorded for other streams that is so when they have done what they had to do when
// it was freed. Poison is written when the stream gets there: to a block that is freed, and to one that comes
// from elsewhere. So all of this is seen, whoever has the memory next:
//
//     another stream uses memory that was freed, and was not recorded     it reads poison
//     another stream does not wait for the one that memory is of          poison is written over its work
//     another stream writes to memory that was freed                      the poison is gone, or others'
//     values
//
// CUDA writes no poison, so programs may let other streams use memory that is freed, if the stream that it is
// of waits for them before it is given it again. FSDP2 does so. With `poison_reused` there is poison only
// then: of the cases above the first two are seen when the memory has another owner.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "streams.h"

namespace sim {

constexpr int kDevices = 2;
constexpr size_t kSpace = size_t{1} << 40;  // addresses of each device
constexpr size_t kAddresses = kSpace * kDevices;
constexpr unsigned char kPoison = 0xFF;     // NaN in every floating type
constexpr size_t kKept = size_t{32} << 20;  // poisoned memory that stays with its streams

class DeviceMemory {
  public:
    explicit DeviceMemory(Scheduler& scheduler);
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory();

    // nullptr if that is more than the limit, or is to be refused.
    void* allocate(size_t length, int device, int stream);
    // The n-th allocation from now on is refused; 0: none is. Returns how many there were since the last
    // call.
    int64_t refuse_at(int64_t n);
    void free(void* address);
    // `stream` uses the memory too: it is not reused before all that the stream has to do when it is freed.
    void record(void* address, int stream);

    const char* addresses() const { return addresses_; }
    void* bytes(const void* address) const;  // throws std::runtime_error if it is not of a device
    int device_of(const void* address) const;

    // Gives recorded memory that is not used any more to the streams that it is of.
    void reap();
    // What went wrong since the last call. All memory that is free and poisoned by now is looked at.
    std::vector<std::string> take_violations();
    void note(std::string violation) { violations_.push_back(std::move(violation)); }

    struct Device {
        size_t allocated = 0, peak = 0, limit = size_t{16} << 30;
        size_t next = 0;  // offset of the addresses that were never used
    };
    Device& device(int number) { return devices_.at(static_cast<size_t>(number)); }

    // Memory that is freed is waited for and poisoned at once, and nobody is given it for a while.
    bool poison_now = false;

    // Memory is poisoned when somebody is given it, and not when it is freed.
    bool poison_reused = false;

  private:
    struct Block {
        char* address;
        size_t length;  // as asked for
        size_t mapped;
        int device, stream;
        std::set<int> recorded;
    };
    struct Held {
        Block block;
        std::vector<Mark> after;
    };
    struct Free {
        Block block;
        std::optional<Mark> poisoned;
    };

    std::optional<Block> take_free(int stream, size_t mapped);
    Block take_unused(int device, size_t mapped);
    Mark poison(const Block& block);
    void give_back(Block block);
    void look_at(const Free& free);
    void release_poisoned();
    void keep_in_bounds();

    Scheduler& scheduler_;
    char* addresses_ = nullptr;
    char* bytes_ = nullptr;
    std::array<Device, kDevices> devices_;
    std::map<const char*, Block> blocks_;  // in use
    std::deque<Held> held_;                // recorded for streams that may still use it
    std::map<std::pair<int, size_t>, std::vector<Free>>
        free_;  // by stream and mapped length, the last one last
    std::map<std::pair<int, size_t>, std::vector<char*>>
        unused_;                             // by device and mapped length; of no stream
    int64_t allocations_ = 0, refused_ = 0;  // see `refuse_at`
    size_t held_length_ = 0, free_length_ = 0;
    size_t release_at_ = kKept;  // `free_length_` from which on poisoned memory is taken from its streams
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
