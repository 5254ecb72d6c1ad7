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

constexpr size_t kPage = 4096;
constexpr size_t kAllocationUnit = 512;  // what the statistics count in, as CUDA's do
constexpr size_t kFreedMax = size_t{256} << 20;

size_t round_up(size_t length, size_t unit) {
    return (length + unit - 1) / unit * unit;
}

char* map(int access) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const mapped = ::mmap(nullptr, kAddresses, access, flags, -1, 0);
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
        ::munmap(addresses_, kAddresses);
        throw;
    }
    (void)::madvise(bytes_, kAddresses, MADV_DONTDUMP);
    (void)::madvise(bytes_, kAddresses, MADV_DONTFORK);  // a child may not use it
}

DeviceMemory::~DeviceMemory() {
    ::munmap(bytes_, kAddresses);
    ::munmap(addresses_, kAddresses);
}

void* DeviceMemory::allocate(size_t length, int number, int stream) {
    Device& device = this->device(number);
    const size_t counted = round_up(length, kAllocationUnit);
    if (device.allocated + counted > device.limit || ++allocations_ == refused_) return nullptr;
    reap();
    const size_t mapped = round_up(length, kPage);
    std::optional<Block> block = take_free(stream, mapped);
    if (!block) {
        block = take_unused(number, mapped);
        block->stream = stream;
        (void)poison(*block);
    }
    block->length = length;
    char* const address = block->address;
    blocks_.emplace(address, std::move(*block));
    device.allocated += counted;
    device.peak = std::max(device.peak, device.allocated);
    return address;
}

int64_t DeviceMemory::refuse_at(int64_t n) {
    refused_ = n;
    return std::exchange(allocations_, 0);
}

std::optional<DeviceMemory::Block> DeviceMemory::take_free(int stream, size_t mapped) {
    if (poison_now) return std::nullopt;
    const auto found = free_.lower_bound({stream, mapped});
    if (found == free_.end() || found->first.first != stream || found->first.second > 2 * mapped) {
        return std::nullopt;
    }
    Free free = std::move(found->second.back());
    found->second.pop_back();
    if (found->second.empty()) free_.erase(found);
    free_length_ -= free.block.mapped;
    look_at(free);
    if (!free.poisoned) (void)poison(free.block);
    return std::move(free.block);
}

DeviceMemory::Block DeviceMemory::take_unused(int number, size_t mapped) {
    std::vector<char*>& unused = unused_[{number, mapped}];
    if (!unused.empty()) {
        char* const address = unused.back();
        unused.pop_back();
        return {address, 0, mapped, number, 0, {}};
    }
    // A page between any two: what is out of bounds is nobody's.
    Device& device = this->device(number);
    if (device.next + mapped + kPage > kSpace) throw std::bad_alloc();
    char* const address = addresses_ + static_cast<size_t>(number) * kSpace + device.next;
    device.next += mapped + kPage;
    return {address, 0, mapped, number, 0, {}};
}

void DeviceMemory::free(void* address) {
    const auto found = blocks_.find(static_cast<char*>(address));
    if (found == blocks_.end()) return;
    Block block = std::move(found->second);
    blocks_.erase(found);
    device(block.device).allocated -= round_up(block.length, kAllocationUnit);
    if (block.recorded.empty()) {
        give_back(std::move(block));
    } else {
        std::vector<Mark> after;
        for (const int stream : block.recorded) after.push_back(scheduler_.mark(stream));
        held_length_ += block.mapped;
        held_.push_back({std::move(block), std::move(after)});
    }
    reap();
    keep_in_bounds();
}

void DeviceMemory::give_back(Block block) {
    block.recorded.clear();
    std::optional<Mark> poisoned;
    if (!poison_reused) poisoned = poison(block);
    if (poison_now) scheduler_.wait(*poisoned);
    free_length_ += block.mapped;
    std::vector<Free>& free = free_[{block.stream, block.mapped}];
    free.push_back({std::move(block), poisoned});
}

Mark DeviceMemory::poison(const Block& block) {
    const auto work = [content = bytes(block.address), length = block.mapped] {
        std::memset(content, kPoison, length);
    };
    scheduler_.append(block.stream, {work, {}, {}, 0, "poison"});
    return scheduler_.mark(block.stream);
}

void DeviceMemory::keep_in_bounds() {
    if (poison_reused) return;  // It stays with its streams, as other streams may still use it.
    // Not late any more, but in bounds. By the clock it would be a wait that no device makes.
    if (held_length_ + free_length_ > kFreedMax && scheduler_.speeds() == nullptr) {
        for (const Held& held : held_) {
            for (const Mark mark : held.after) scheduler_.wait(mark);
        }
        reap();
        for (const auto& [_, blocks] : free_) {
            for (const Free& free : blocks) {
                if (free.poisoned) scheduler_.wait(*free.poisoned);
            }
        }
        release_poisoned();
    } else if (free_length_ > release_at_) {
        release_poisoned();
    }
}

void DeviceMemory::record(void* address, int stream) {
    const auto found = blocks_.find(static_cast<char*>(address));
    if (found != blocks_.end() && stream != found->second.stream) found->second.recorded.insert(stream);
}

void* DeviceMemory::bytes(const void* address) const {
    const char* const at = static_cast<const char*>(address);
    if (at < addresses_ || at >= addresses_ + kAddresses) {
        throw std::runtime_error("sim: not an address of a device");
    }
    return bytes_ + (at - addresses_);
}

int DeviceMemory::device_of(const void* address) const {
    (void)bytes(address);
    return static_cast<int>(static_cast<size_t>(static_cast<const char*>(address) - addresses_) / kSpace);
}

void DeviceMemory::reap() {
    if (held_.empty()) return;
    const auto in_use = [this](const Held& held) {
        return !std::all_of(held.after.begin(), held.after.end(),
                            [this](Mark mark) { return scheduler_.reached(mark); });
    };
    const auto unused = std::stable_partition(held_.begin(), held_.end(), in_use);
    for (auto held = unused; held != held_.end(); ++held) {
        held_length_ -= held->block.mapped;
        give_back(std::move(held->block));
    }
    held_.erase(unused, held_.end());
}

void DeviceMemory::look_at(const Free& free) {
    if (!free.poisoned || !scheduler_.reached(*free.poisoned) || free.block.mapped == 0) return;
    auto* const content = static_cast<unsigned char*>(bytes(free.block.address));
    if (content[0] == kPoison && std::memcmp(content, content + 1, free.block.mapped - 1) == 0) return;
    note("device memory was written to after it was freed: " + std::to_string(free.block.length) +
         " bytes of stream " + std::to_string(free.block.stream));
    std::memset(content, kPoison, free.block.mapped);
}

void DeviceMemory::release_poisoned() {
    for (auto& [_, blocks] : free_) {
        std::vector<Free> left;
        for (Free& free : blocks) {
            if (!free.poisoned || !scheduler_.reached(*free.poisoned)) {
                left.push_back(std::move(free));
                continue;
            }
            look_at(free);
            free_length_ -= free.block.mapped;
            unused_[{free.block.device, free.block.mapped}].push_back(free.block.address);
        }
        blocks = std::move(left);
    }
    std::erase_if(free_, [](const auto& blocks) { return blocks.second.empty(); });
    release_at_ = std::max(kKept, 2 * free_length_);
}

std::vector<std::string> DeviceMemory::take_violations() {
    reap();
    for (const auto& [_, blocks] : free_) {
        for (const Free& free : blocks) look_at(free);
    }
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
    if (scheduler_.finish({found->first, found->second})) {  // Before it is unmapped.
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
