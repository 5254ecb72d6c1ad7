// The engine alone, without Python: over every backend with faults, for the sanitizers. See the Makefile.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "engine.h"

using swapper::BackendKind;
using swapper::Engine;
using swapper::EngineOptions;
using swapper::FaultPlan;
using swapper::File;
using swapper::IoError;
using swapper::OpenOptions;
using swapper::Operation;
using swapper::Slab;
using swapper::StateError;
using swapper::Transfer;

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                               \
        }                                                                               \
    } while (false)

namespace {

constexpr uint64_t kBlock = 16384;
std::string directory;

std::shared_ptr<File> open_file(const std::string& name, bool direct) {
    OpenOptions options;
    options.access = swapper::Access::kReadWrite;
    options.create = true;
    options.direct = direct;
    return std::make_shared<File>(directory + "/" + name, options);
}

uint64_t wait(const Transfer& transfer) {
    while (!transfer.wait(1000)) {
    }
    return transfer.result();
}

int error_of(const Transfer& transfer) {
    try {
        wait(transfer);
        return 0;
    } catch (const IoError& error) {
        return error.code;
    }
}

void fill(char* data, uint64_t length, uint64_t seed) {
    std::mt19937_64 random(seed);
    for (uint64_t i = 0; i < length; ++i) data[i] = static_cast<char>(random());
}

EngineOptions options_for(BackendKind kind) {
    EngineOptions options;
    options.backend = kind;
    options.block_bytes = kBlock;
    options.queue_depth = 4;
    options.threads = 2;
    return options;
}

// Sizes around the block, offsets and addresses of every alignment.
void round_trips(BackendKind kind, const std::shared_ptr<FaultPlan>& faults, bool direct) {
    EngineOptions options = options_for(kind);
    options.faults = faults;
    Engine engine(options);
    const auto slab = std::make_shared<Slab>(4 << 20);
    if (kind == BackendKind::kUring) engine.register_slab(slab);
    const auto file = open_file("round_trips", direct);
    for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{4095}, uint64_t{4096}, kBlock - 1,
                                  kBlock, 3 * kBlock + 13, 40 * kBlock}) {
        for (const uint64_t offset : {uint64_t{0}, uint64_t{4096}, uint64_t{5001}}) {
            char* const source = slab->data() + offset % 4096 % 7;
            char* const target = source + (2 << 20);
            fill(source, length, length + offset);
            std::memset(target, 0, length);
            CHECK(wait(*engine.start(Operation::kWrite, file, source, length, offset)) == length);
            CHECK(wait(*engine.start(Operation::kRead, file, target, length, offset)) == length);
            CHECK(std::memcmp(source, target, length) == 0);
        }
    }
    engine.unregister_slab(slab.get());
}

void callers_share_an_engine(BackendKind kind) {
    Engine engine(options_for(kind));
    std::vector<std::thread> threads;
    for (int caller = 0; caller < 4; ++caller) {
        threads.emplace_back([&engine, caller] {
            const auto file = open_file("caller" + std::to_string(caller), true);
            const Slab slab(2 << 20);
            for (int turn = 0; turn < 20; ++turn) {
                fill(slab.data(), 100000, static_cast<uint64_t>(turn));
                wait(*engine.start(Operation::kWrite, file, slab.data(), 100000, 0, 1));
                wait(*engine.start(Operation::kRead, file, slab.data() + (1 << 20), 100000, 0, 1));
                CHECK(std::memcmp(slab.data(), slab.data() + (1 << 20), 100000) == 0);
                engine.take_finished();
            }
        });
    }
    const auto slab = std::make_shared<Slab>(1 << 20);
    for (int turn = 0; turn < 10; ++turn) {
        engine.register_slab(slab);
        engine.unregister_slab(slab.get());
    }
    for (std::thread& thread : threads) thread.join();
}

void failures_are_reported(BackendKind kind) {
    EngineOptions options = options_for(kind);
    options.faults = std::make_shared<FaultPlan>();
    Engine engine(options);
    const Slab slab(2 << 20);
    const auto file = open_file("failures", true);
    wait(*engine.start(Operation::kWrite, file, slab.data(), 100000, 0, 1));
    CHECK(error_of(*engine.start(Operation::kRead, file, slab.data(), 100000, 1)) == ENODATA);
    options.faults->fail_error = ENOSPC;
    options.faults->fail_write_at = 2;
    CHECK(error_of(*engine.start(Operation::kWrite, file, slab.data(), 4 * kBlock, 0)) == ENOSPC);
    CHECK(error_of(*engine.start(Operation::kWrite, file, slab.data(), 4 * kBlock, 0)) == 0);
}

void close_drains(BackendKind kind) {
    EngineOptions options = options_for(kind);
    options.faults = std::make_shared<FaultPlan>();
    options.faults->delay_us = 5000;
    const Slab slab(2 << 20);
    const auto file = open_file("close", true);
    std::vector<std::shared_ptr<Transfer>> transfers;
    {
        Engine engine(options);
        for (uint64_t i = 0; i < 16; ++i) {
            transfers.push_back(engine.start(Operation::kWrite, file, slab.data(), 2 * kBlock, i * kBlock));
        }
        engine.close();
        engine.close();
        try {
            engine.start(Operation::kWrite, file, slab.data(), 1, 0);
            CHECK(false);
        } catch (const StateError&) {
        }
    }
    for (const auto& transfer : transfers) CHECK(transfer->done() && transfer->result() == 2 * kBlock);
}

// As after a failure of the engine: what is in flight may not touch memory that is given back afterwards.
void backend_ends_with_requests_in_flight(BackendKind kind) {
    const auto file = open_file("in_flight", true);
    std::vector<char> data(64 * kBlock);
    std::vector<swapper::Request> requests(8);
    {
        const auto make = kind == BackendKind::kAio     ? swapper::make_aio_backend
                          : kind == BackendKind::kUring ? swapper::make_uring_backend
                                                        : swapper::make_threads_backend;
        const auto backend = swapper::make_fault_backend(make(8), std::make_shared<FaultPlan>(), 0);
        for (size_t i = 0; i < requests.size(); ++i) {
            swapper::Request* const request = &requests[i];
            request->operation = Operation::kWrite;
            request->fd = file->buffered_fd();
            request->data = data.data() + i * 8 * kBlock;
            request->length = 8 * kBlock;
            request->offset = i * 8 * kBlock;
            CHECK(backend->submit(&request, 1) == 1);
        }
    }
    CHECK(file->size() == data.size());
}

void run(BackendKind kind) {
    for (const bool direct : {true, false}) {
        round_trips(kind, nullptr, direct);
        for (uint64_t seed = 0; seed < 3; ++seed) {
            const auto faults = std::make_shared<FaultPlan>();
            faults->seed = seed;
            faults->short_transfer = 0.3;
            faults->eintr = 0.1;
            faults->eagain = 0.1;
            faults->delay_us = 100;
            faults->reorder = true;
            round_trips(kind, faults, direct);
        }
    }
    callers_share_an_engine(kind);
    failures_are_reported(kind);
    close_drains(kind);
    backend_ends_with_requests_in_flight(kind);
}

}  // namespace

int main() {
    char name[] = "./engine_test.XXXXXX";
    CHECK(::mkdtemp(name) != nullptr);
    directory = name;
    const struct {
        BackendKind kind;
        const char* name;
    } kinds[] = {
        {BackendKind::kThreads, "threads"}, {BackendKind::kAio, "aio"}, {BackendKind::kUring, "uring"}};
    for (const auto& [kind, kind_name] : kinds) {
        const std::string reason = swapper::probe_backend(kind, false);
        if (reason.empty()) run(kind);
        std::printf("%s: %s\n", kind_name, reason.empty() ? "passed" : ("skipped, " + reason).c_str());
    }
    for (const char* file :
         {"round_trips", "caller0", "caller1", "caller2", "caller3", "failures", "close", "in_flight"}) {
        ::unlink((directory + "/" + file).c_str());
    }
    CHECK(::rmdir(name) == 0);
    return 0;
}
