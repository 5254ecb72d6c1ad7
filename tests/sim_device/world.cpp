#include "world.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

extern "C" {
// Of Python.h, which this is not built with.
[[gnu::weak]] int PyGILState_Check();
[[gnu::weak]] void* PyEval_SaveThread();
[[gnu::weak]] void PyEval_RestoreThread(void* state);
}

namespace sim {
namespace {

std::atomic<bool> g_begun{false};
std::atomic<bool> g_forked{false};
std::array<std::atomic<bool>, kDevices> g_contexts{};
thread_local int t_device = 0;
thread_local int t_of_driver = 0;  // see [Note: contexts]

std::array<int, kDevices> default_streams() {
    std::array<int, kDevices> streams{};
    std::iota(streams.begin(), streams.end(), 0);
    return streams;
}
thread_local std::array<int, kDevices> t_streams = default_streams();

struct Shared {
    std::mutex mutex;
    World world;
};

// Never destroyed: tensors are freed until the process ends.
Shared& shared() {
    static Shared& made = []() -> Shared& {
        auto fresh = std::make_unique<Shared>();
        for (const int stream : default_streams()) fresh->world.scheduler.add_stream(stream);
        ::pthread_atfork(nullptr, nullptr, [] { g_forked = g_begun.load(); });
        g_begun = true;
        return *fresh.release();
    }();
    return made;
}

std::unique_lock<std::mutex> locked() {
    // Before the lock: another thread of the parent may have held it when this process was forked.
    if (is_forked()) {
        throw std::runtime_error(
            "Cannot use the simulated device in a forked subprocess, as its parent has used it before. Use "
            "the "
            "start method 'spawn'");
    }
    std::unique_lock lock(shared().mutex, std::try_to_lock);
    if (!lock) {
        // Who has the lock may need Python's, as a kernel does that puts the hooks of a thread back. Some of
        // torch's calls, as the query of an event, come here with it.
        void* const python =
            PyGILState_Check != nullptr && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
        lock.lock();
        if (python != nullptr) PyEval_RestoreThread(python);
    }
    return lock;
}

}  // namespace

Entered::Entered() : lock_(locked()), world_(shared().world) {}

Entered::~Entered() {
    const auto spent = world_.scheduler.take_spent();
    lock_.unlock();
}

bool is_forked() noexcept {
    return g_forked;
}
bool has_begun() noexcept {
    return g_begun;
}

void* device_bytes(const void* address) {
    return shared().world.memory.bytes(address);
}

int current_device() noexcept {
    return t_device;
}
int exchange_device(int device) noexcept {
    if (device >= 0 && device != t_of_driver) {
        t_of_driver = device;
        note_context(device);
    }
    return std::exchange(t_device, device < 0 ? t_device : device);
}
int exchange_device_if_in_use(int device) noexcept {
    if (device >= 0 && g_contexts[static_cast<size_t>(device)]) t_of_driver = device;
    return std::exchange(t_device, device < 0 ? t_device : device);
}

void note_context(int device) noexcept {
    g_contexts[static_cast<size_t>(device < 0 ? t_of_driver : device)] = true;
}
std::vector<int64_t> contexts() {
    std::vector<int64_t> found;
    for (size_t device = 0; device < kDevices; ++device) {
        if (g_contexts[device]) found.push_back(static_cast<int64_t>(device));
    }
    return found;
}
void forget_contexts() noexcept {
    for (auto& each : g_contexts) each = false;
}

int current_stream(int device) noexcept {
    return t_streams[static_cast<size_t>(device < 0 ? t_device : device)];
}

int exchange_stream(int stream, int device) noexcept {
    return std::exchange(t_streams[static_cast<size_t>(device)], stream);
}

void raise_failure(World& world) {
    const std::string failure = world.scheduler.take_failure();
    if (!failure.empty())
        throw std::runtime_error("sim: a kernel failed, which may have been started long ago: " + failure);
}

}  // namespace sim
