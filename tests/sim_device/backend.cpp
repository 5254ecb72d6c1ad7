#include "backend.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstring>
#include <memory>

#include "world.h"

namespace sim {

int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
}

// --- Random numbers

Generator::Generator(int device, uint64_t seed, uint64_t offset)
    : c10::GeneratorImpl(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      seed_(seed),
      offset_(offset) {}

void Generator::set_current_seed(uint64_t seed) {
    seed_ = seed;
    offset_ = 0;
}

uint64_t Generator::seed() {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "sim: the state of a generator is 16 bytes");
    const auto* const bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
    const at::Tensor state = at::empty({16}, at::kByte);
    auto* const bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
}

uint64_t Generator::next() {
    uint64_t mixed = seed_ + ++offset_ * 0x9E3779B97F4A7C15;  // splitmix64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    return mixed ^ (mixed >> 31);
}

Generator* Generator::clone_impl() const {
    return c10::make_intrusive<Generator>(device().index(), seed_, offset_).release();
}

const at::Generator& default_generator(int device) {
    static const std::array<at::Generator, kDevices> generators = [] {
        std::array<at::Generator, kDevices> made;
        for (int i = 0; i < kDevices; ++i) {
            made[static_cast<size_t>(i)] = at::make_generator<Generator>(i, c10::default_rng_seed_val);
        }
        return made;
    }();
    return generators.at(static_cast<size_t>(device < 0 ? current_device() : device));
}

namespace {

c10::Device device_at(int index) {
    return {kDeviceType, static_cast<c10::DeviceIndex>(index)};
}

// --- Memory

class DeviceAllocator final : public c10::DeviceAllocator {
  public:
    c10::DataPtr allocate(size_t length) override {
        const int device = current_device();
        void* const address = length == 0 ? nullptr : allocate(length, device);
        return {address, address, &free, device_at(device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free; }
    void copy_data(void* to, const void* from, size_t length) const override {
        const Entered world;
        world->scheduler.push(current_stream(world->memory.device_of(to)),
                              {[destination = world->memory.bytes(to), source = world->memory.bytes(from),
                                length] { std::memcpy(destination, source, length); },
                               {},
                               {},
                               0,
                               "copy_data"});
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
        Entered()->memory.record(data.get(), static_cast<int>(stream.id()));
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
        const Entered world;
        const DeviceMemory::Device& device = world->memory.device(index);
        c10::CachingDeviceAllocator::DeviceStats stats;
        for (auto* const of_kind : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
            (*of_kind)[0].current = static_cast<int64_t>(device.allocated);
            (*of_kind)[0].peak = static_cast<int64_t>(device.peak);
        }
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex index) override {
        const Entered world;
        world->memory.device(index).peak = world->memory.device(index).allocated;
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
        const Entered world;
        const DeviceMemory::Device& device = world->memory.device(index);
        return {device.limit - std::min(device.limit, device.allocated), device.limit};
    }

  private:
    static void* allocate(size_t length, int index) {
        note_context(index);
        const Entered world;
        void* const address = world->memory.allocate(length, index, current_stream(index));
        if (address == nullptr) {
            const DeviceMemory::Device& device = world->memory.device(index);
            TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", length,
                             " bytes. Device ", index, " has a total capacity of ", device.limit,
                             " bytes of which ", device.limit - std::min(device.limit, device.allocated),
                             " bytes are free.");
        }
        return address;
    }
    static void free(void* address) {
        if (address != nullptr && !is_forked()) Entered()->memory.free(address);
    }
};
DeviceAllocator g_allocator;
REGISTER_ALLOCATOR(kDeviceType, &g_allocator);

class HostAllocator final : public at::HostAllocator {
  public:
    c10::DataPtr allocate(size_t length) override {
        void* const address = Entered()->host.allocate(length);
        return {address, address, &free, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free; }
    void copy_data(void* to, const void* from, size_t length) const override {
        std::memcpy(to, from, length);
    }
    // The scheduler knows which memory is in use.
    bool record_event(void*, void*, c10::Stream) override { return true; }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}

  private:
    static void free(void* address) {
        if (address != nullptr && !is_forked()) Entered()->host.free(address);
    }
};
HostAllocator g_host_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &g_host_allocator);

// --- Streams and events

struct Event {
    Mark mark;
    std::shared_ptr<double> reached_us = std::make_shared<double>(-1);
};

Event& event_of(void* event) {
    return *static_cast<Event*>(event);
}
c10::Stream stream_at(int number, int device) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(device), number);
}

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
  public:
    c10::DeviceType type() const override { return kDeviceType; }
    c10::Device exchangeDevice(c10::Device device) const override {
        return device_at(exchange_device(device.index()));
    }
    c10::Device getDevice() const override { return device_at(current_device()); }
    void setDevice(c10::Device device) const override { exchange_device(device.index()); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        exchange_device_if_in_use(device.index());
    }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
    c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
    void synchronizeDevice(c10::DeviceIndex index) const override {
        const Entered world;
        const int device = index < 0 ? current_device() : index;
        Scheduler& scheduler = world->scheduler;
        for (int stream = 0; stream < scheduler.stream_count(); ++stream) {
            if (scheduler.device_of(stream) == device && !scheduler.reached(scheduler.mark(stream))) {
                scheduler.wait(scheduler.mark(stream));
            }
        }
        waited(*world);
    }

    c10::Stream getStream(c10::Device device) const noexcept override {
        const int index = index_of(device);
        return stream_at(current_stream(index), index);
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return stream_at(index_of(device), index_of(device));
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return stream_at(Entered()->scheduler.add_stream(index_of(device)), index_of(device));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
        const int index = index_of(stream.device());
        return stream_at(exchange_stream(static_cast<int>(stream.id()), index), index);
    }
    bool queryStream(const c10::Stream& stream) const override {
        const Entered world;
        return poll(*world, world->scheduler.mark(static_cast<int>(stream.id())));
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        const Entered world;
        world->scheduler.wait(world->scheduler.mark(static_cast<int>(stream.id())));
        waited(*world);
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        g_allocator.recordStream(data, stream);
    }

    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
        const std::unique_ptr<Event> owned(static_cast<Event*>(event));
    }
    void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
        const Entered world;
        if (*event == nullptr) *event = std::make_unique<Event>().release();
        Event fresh;
        Scheduler& scheduler = world->scheduler;
        const auto number = static_cast<int>(stream.id());
        scheduler.push(number,
                       {[&scheduler, reached_us = fresh.reached_us] { *reached_us = scheduler.work_us(); },
                        {},
                        {},
                        0,
                        "event"});
        fresh.mark = scheduler.mark(number);
        event_of(*event) = fresh;
        world->memory.reap();
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event == nullptr) return;
        const Entered world;
        world->scheduler.push(static_cast<int>(stream.id()), {{}, event_of(event).mark, {}, 0, "wait"});
        world->memory.reap();
    }
    bool queryEvent(void* event) const override {
        if (event == nullptr) return true;
        note_context(-1);
        const Entered world;
        return poll(*world, event_of(event).mark);
    }
    void synchronizeEvent(void* event) const override {
        if (event == nullptr) return;
        note_context(-1);
        const Entered world;
        world->scheduler.wait(event_of(event).mark);
        waited(*world);
    }
    double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
        const Entered world;
        TORCH_CHECK(first != nullptr && second != nullptr, "sim: both events must be recorded");
        const double from = *event_of(first).reached_us, to = *event_of(second).reached_us;
        TORCH_CHECK(from >= 0 && to >= 0, "sim: both events must be reached");
        return (to - from) / 1000;
    }

  private:
    static bool poll(World& world, Mark mark) {
        const bool reached = world.scheduler.poll(mark);
        waited(world);
        return reached;
    }
    static void waited(World& world) {
        world.memory.reap();
        raise_failure(world);
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

// --- What else torch asks of a device

class Hooks final : public at::PrivateUse1HooksInterface {
  public:
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return kDevices; }
    void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
    c10::DeviceIndex getCurrentDevice() const override {
        return static_cast<c10::DeviceIndex>(current_device());
    }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return static_cast<c10::DeviceIndex>(exchange_device(device));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return static_cast<c10::DeviceIndex>(exchange_device_if_in_use(device));
    }
    at::Allocator* getPinnedMemoryAllocator() const override { return &g_host_allocator; }
    bool isPinnedPtr(const void* address) const override {
        return has_begun() && !is_forked() && Entered()->host.is_locked(address);
    }
    at::Device getDeviceFromPtr(void* address) const override {
        return device_at(Entered()->memory.device_of(address));
    }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return at::make_generator<Generator>(device < 0 ? current_device() : device,
                                             c10::default_rng_seed_val);
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t length) const override {
        const c10::DeviceGuard guard(storage.device());
        c10::DataPtr fresh = g_allocator.allocate(length);
        const size_t kept = std::min(length, storage.nbytes());
        if (kept > 0) g_allocator.copy_data(fresh.get(), storage.data(), kept);
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
        storage.unsafeGetStorageImpl()->set_nbytes(length);
    }
};

const bool g_registered = [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    return true;
}();

}  // namespace
}  // namespace sim
