#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

namespace sim {
namespace {

constexpr size_t kSpace = size_t{1} << 40;  // addresses of each device
constexpr size_t kPage = 4096;
constexpr size_t kAllocationUnit = 512;  // what the statistics count in, as CUDA's do
constexpr size_t kQuarantine = size_t{32} << 20;
constexpr size_t kFreedMax = size_t{256} << 20;

size_t round_up(size_t length, size_t unit) {
    return (length + unit - 1) / unit * unit;
}

char* map(int access) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const mapped = ::mmap(nullptr, kSpace * kDevices, access, flags, -1, 0);
    if (mapped == MAP_FAILED)
        throw std::system_error(errno, std::generic_category(), "sim: map device memory");
    return static_cast<char*>(mapped);
}

}  // namespace

DeviceMemory::DeviceMemory(Scheduler& scheduler) : scheduler_(scheduler) {
    addresses_ = map(PROT_NONE);
    try {
        bytes_ = map(PROT_READ | PROT_WRITE);
    } catch (...) {
        ::munmap(addresses_, kSpace * kDevices);
        throw;
    }
    (void)::madvise(bytes_, kSpace * kDevices, MADV_DONTDUMP);
    (void)::madvise(bytes_, kSpace * kDevices, MADV_DONTFORK);  // a child may not use it
}

DeviceMemory::~DeviceMemory() {
    ::munmap(bytes_, kSpace * kDevices);
    ::munmap(addresses_, kSpace * kDevices);
}

void* DeviceMemory::allocate(size_t length, int number, int stream) {
    Device& device = this->device(number);
    const size_t counted = round_up(length, kAllocationUnit);
    if (device.allocated + counted > device.limit) return nullptr;
    const size_t mapped = round_up(length, kPage);
    std::vector<char*>& found = free_[{number, mapped}];
    char* address = nullptr;
    if (!found.empty()) {
        address = found.back();
        found.pop_back();
    } else {
        // A page between any two: what is out of bounds is nobody's.
        if (device.next + mapped + kPage > kSpace) throw std::bad_alloc();
        address = addresses_ + static_cast<size_t>(number) * kSpace + device.next;
        device.next += mapped + kPage;
        std::memset(bytes(address), kPoison, mapped);
    }
    blocks_[address] = {length, number, stream, {}};
    device.allocated += counted;
    device.peak = std::max(device.peak, device.allocated);
    return address;
}

void DeviceMemory::free(void* address) {
    const auto found = blocks_.find(static_cast<char*>(address));
    if (found == blocks_.end()) return;
    Freed freed{static_cast<char*>(address), std::move(found->second), {}};
    blocks_.erase(found);
    const Block& block = freed.block;
    device(block.device).allocated -= round_up(block.length, kAllocationUnit);
    freed.after.push_back(scheduler_.mark(block.stream));
    for (const int stream : block.recorded) freed.after.push_back(scheduler_.mark(stream));
    if (poison_now && block.recorded.empty()) scheduler_.wait(freed.after.front());
    freed_length_ += block.length;
    freed_.push_back(std::move(freed));
    while (freed_length_ > kFreedMax) {  // Not late any more, but in bounds.
        for (const Mark mark : freed_.front().after) scheduler_.wait(mark);
        reap();
    }
    reap();
}

void DeviceMemory::record(void* address, int stream) {
    const auto found = blocks_.find(static_cast<char*>(address));
    if (found != blocks_.end() && stream != found->second.stream) found->second.recorded.insert(stream);
}

void* DeviceMemory::bytes(const void* address) const {
    const char* const at = static_cast<const char*>(address);
    if (at < addresses_ || at >= addresses_ + kSpace * kDevices) {
        throw std::runtime_error("sim: not an address of a device");
    }
    return bytes_ + (at - addresses_);
}

int DeviceMemory::device_of(const void* address) const {
    (void)bytes(address);
    return static_cast<int>(static_cast<size_t>(static_cast<const char*>(address) - addresses_) / kSpace);
}

void DeviceMemory::reap() {
    if (freed_.empty()) return;
    const auto in_use = [this](const Freed& freed) {
        return !std::all_of(freed.after.begin(), freed.after.end(),
                            [this](Mark mark) { return scheduler_.reached(mark); });
    };
    const auto unused = std::stable_partition(freed_.begin(), freed_.end(), in_use);
    for (auto freed = unused; freed != freed_.end(); ++freed) poison(*freed);
    freed_.erase(unused, freed_.end());
    while (quarantine_length_ > kQuarantine) look_at_oldest();
}

void DeviceMemory::poison(const Freed& freed) {
    std::memset(bytes(freed.address), kPoison, freed.block.length);
    freed_length_ -= freed.block.length;
    quarantine_length_ += freed.block.length;
    quarantine_.push_back({freed.address, freed.block, {}});
}

void DeviceMemory::look_at_oldest() {
    const Freed freed = std::move(quarantine_.front());
    quarantine_.pop_front();
    const size_t length = freed.block.length;
    quarantine_length_ -= length;
    auto* const content = static_cast<unsigned char*>(bytes(freed.address));
    if (length > 0 && (content[0] != kPoison || std::memcmp(content, content + 1, length - 1) != 0)) {
        note("device memory was written to after it was freed: " + std::to_string(length) +
             " bytes of stream " + std::to_string(freed.block.stream));
        std::memset(content, kPoison, length);
    }
    free_[{freed.block.device, round_up(length, kPage)}].push_back(freed.address);
}

std::vector<std::string> DeviceMemory::take_violations() {
    reap();
    while (!quarantine_.empty()) look_at_oldest();
    return std::exchange(violations_, {});
}

void* HostMemory::allocate(size_t length) {
    free_unused();
    void* address = nullptr;
    if (::posix_memalign(&address, kPage, std::max<size_t>(length, 1)) != 0) throw std::bad_alloc();
    locked_[static_cast<char*>(address)] = length;
    return address;
}

void HostMemory::free(void* address) {
    const auto found = locked_.find(static_cast<char*>(address));
    if (found == locked_.end()) return;
    freed_.push_back({found->first, found->second});
    locked_.erase(found);
    free_unused();
}

void HostMemory::free_unused() {
    const auto unused = std::partition(freed_.begin(), freed_.end(),
                                       [this](HostRange range) { return scheduler_.uses(range); });
    for (auto range = unused; range != freed_.end(); ++range) std::free(const_cast<char*>(range->start));
    freed_.erase(unused, freed_.end());
}

void HostMemory::lock(const void* address, size_t length) {
    if (!locked_.emplace(static_cast<const char*>(address), length).second) {
        throw std::runtime_error("sim: the memory is page-locked already");
    }
}

void HostMemory::unlock(const void* address) {
    const auto found = locked_.find(static_cast<const char*>(address));
    if (found == locked_.end()) throw std::runtime_error("sim: the memory is not page-locked");
    if (scheduler_.uses({found->first, found->second})) {
        device_.note("memory of the host was unlocked while copies from or to it were in flight");
    }
    const auto start = reinterpret_cast<uintptr_t>(found->first) / kPage * kPage;
    const size_t length = reinterpret_cast<uintptr_t>(found->first) + found->second - start;
    std::vector<unsigned char> pages(round_up(length, kPage) / kPage);
    if (::mincore(reinterpret_cast<void*>(start), length, pages.data()) != 0 && errno == ENOMEM) {
        device_.note("memory of the host was unlocked after it was unmapped");
    }
    locked_.erase(found);
}

bool HostMemory::is_locked(const void* address) const {
    const char* const at = static_cast<const char*>(address);
    auto found = locked_.upper_bound(at);
    if (found == locked_.begin()) return false;
    --found;
    return at < found->first + found->second;
}

}  // namespace sim
