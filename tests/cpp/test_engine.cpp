// The engine alone, without Python: over every backend with faults, for the sanitizers.
#include "engine.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"

using swapper::BackendKind;
using swapper::Checksums;
using swapper::Engine;
using swapper::EngineOptions;
using swapper::FaultPlan;
using swapper::File;
using swapper::IoError;
using swapper::Operation;
using swapper::Slab;
using swapper::StateError;
using swapper::Transfer;

namespace {

constexpr uint64_t kBlock = 16384;
const TemporaryDirectory directory;

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

EngineOptions options_for(BackendKind kind) {
    EngineOptions options;
    options.backend = kind;
    options.block_bytes = kBlock;
    options.queue_depth = 4;
    options.threads = 2;
    return options;
}

// Some of everything that can go wrong without ending the engine.
std::shared_ptr<FaultPlan> harmful(uint64_t seed) {
    auto faults = std::make_shared<FaultPlan>();
    faults->seed = seed;
    faults->short_transfer = 0.2;
    faults->eio = 0.01;
    faults->eintr = 0.05;
    faults->eagain = 0.02;
    faults->delay_us = 100;
    faults->reorder = true;
    return faults;
}

// Sizes around the block, offsets and addresses of every alignment.
void round_trips(BackendKind kind, const std::shared_ptr<FaultPlan>& faults, bool direct) {
    EngineOptions options = options_for(kind);
    options.faults = faults;
    Engine engine(options);
    const auto slab = std::make_shared<Slab>(4 << 20);
    if (kind == BackendKind::kUring) engine.register_slab(slab);
    const auto file = open_file(directory / "round_trips", direct);
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
            const auto file = open_file(directory / ("caller" + std::to_string(caller)));
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
    const auto file = open_file(directory / "failures");
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
    const auto file = open_file(directory / "close");
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
    const auto file = open_file(directory / "in_flight");
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
            request->fd = file->fileno();
            request->data = data.data() + i * 8 * kBlock;
            request->length = 8 * kBlock;
            request->offset = i * 8 * kBlock;
            CHECK(backend->submit(&request, 1) == 1);
        }
    }
    CHECK(file->size() == data.size());
}

// Blocks of a file that several threads write and read at a time, each its own, and one that was changed
// behind their backs.
void checksums_are_checked(BackendKind kind, bool direct) {
    EngineOptions options = options_for(kind);
    options.faults = harmful(7);
    options.faults->eio = 0;
    Engine engine(options);
    constexpr uint64_t kLength = 6 * kBlock + 13;  // per thread; the last block is not full
    constexpr uint64_t kRegion = 7 * kBlock;
    const auto file = open_file(directory / "checksums", direct);
    const auto checksums = std::make_shared<Checksums>(4 * kRegion, kBlock);
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&engine, &file, &checksums, thread] {
            std::vector<char> data(kLength);
            fill(data.data(), kLength, thread);
            for (const Operation operation : {Operation::kWrite, Operation::kRead, Operation::kRead}) {
                const auto transfer =
                    engine.start(operation, file, data.data(), kLength, thread * kRegion, 0, checksums);
                CHECK(error_of(*transfer) == 0);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();

    std::vector<char> data(kLength);
    for (const uint64_t block :
         {uint64_t{6}, uint64_t{3}, uint64_t{0}}) {  // the last first: it is found alone
        const uint64_t bad = kRegion + block * kBlock;
        char byte;
        const auto at = static_cast<off_t>(bad + 5);
        CHECK(::pread(file->fileno(), &byte, 1, at) == 1);
        byte = static_cast<char>(byte ^ 0x10);
        CHECK(::pwrite(file->fileno(), &byte, 1, at) == 1);
        const auto transfer =
            engine.start(Operation::kRead, file, data.data(), kLength, kRegion, 0, checksums);
        CHECK(error_of(*transfer) == EBADMSG);
        const auto named = static_cast<uint64_t>(transfer->error().offset);
        CHECK(block == 6 ? named == bad : named >= bad && (named - kRegion) % (3 * kBlock) == 0);
    }
    CHECK_THROWS(std::invalid_argument,
                 engine.start(Operation::kRead, file, data.data(), kBlock, 1, 0, checksums));
    CHECK_THROWS(std::invalid_argument,
                 engine.start(Operation::kRead, file, data.data(), kBlock, 4 * kRegion, 0, checksums));
}

// One of several threads that use an engine until it is closed under them: starts, waits for some, looks at
// others, drops the rest; and touches its memory the moment that a transfer is over.
class Caller {
  public:
    Caller(Engine& engine, std::shared_ptr<File> file, char* memory, uint64_t index, std::atomic<int>& turns)
        : engine_(engine), file_(std::move(file)), memory_(memory), index_(index), turns_(turns) {}

    void operator()() {
        try {
            for (uint64_t turn = 0;; ++turn, ++turns_) use(turn);
        } catch (const StateError&) {
            // Closed. What was started before is the engine's to finish.
        }
    }

    static constexpr uint64_t kRegion = 16 * kBlock + 100;  // in the file; neighbours share a page
    static constexpr uint64_t kArea = 17 * kBlock;
    static constexpr uint64_t kMemory = 3 * kArea;  // what is written, what is read, what is read unattended
    std::vector<uint64_t> keys;                     // of what was started
    std::vector<std::shared_ptr<Transfer>> transfers;

  private:
    void use(uint64_t turn) {
        std::mt19937_64 random(index_ * 1000003 + turn);
        char* const source = memory_ + random() % 2 * (random() % 4096);
        char* const target = source + kArea;
        fill(source, kRegion, turn);
        std::vector<std::shared_ptr<Transfer>> started;
        std::vector<uint64_t> cuts = {0, kRegion};
        for (int i = 0; i < 4; ++i) cuts.push_back(random() % kRegion);
        std::sort(cuts.begin(), cuts.end());
        bool written = true;
        for (size_t i = 0; i + 1 < cuts.size(); ++i)
            started.push_back(start(Operation::kWrite, source, cuts, i));
        for (const auto& transfer : started) {
            while (!transfer->wait(random() % 2)) {
            }
            written = !transfer->failed() && written;
        }
        started.clear();
        for (size_t i = 0; i + 1 < cuts.size(); ++i)
            started.push_back(start(Operation::kRead, target, cuts, i));
        for (size_t i = 0; i < started.size(); ++i) {
            const bool failed = error_of(*started[i]) != 0;
            if (written && !failed)
                CHECK(std::memcmp(source + cuts[i], target + cuts[i], cuts[i + 1] - cuts[i]) == 0);
            std::memset(target + cuts[i], 0, cuts[i + 1] - cuts[i]);
        }
        // Nobody waits for this one but whoever closes; its memory is its own until it is over.
        if (!stray_ || stray_->done()) {
            stray_ = start(Operation::kRead, memory_ + 2 * kArea + random() % 4096, {0, kRegion}, 0);
        }
    }

    std::shared_ptr<Transfer> start(Operation operation, char* memory, const std::vector<uint64_t>& cuts,
                                    size_t i) {
        const uint64_t key = index_ << 32 | (keys.size() + 1);
        auto transfer = engine_.start(operation, file_, memory + cuts[i], cuts[i + 1] - cuts[i],
                                      index_ * kRegion + cuts[i], key);
        keys.push_back(key);
        transfers.push_back(transfer);
        return transfer;
    }

    std::shared_ptr<Transfer> stray_;
    Engine& engine_;
    const std::shared_ptr<File> file_;
    char* const memory_;
    const uint64_t index_;
    std::atomic<int>& turns_;
};

// All that may be called from any thread, called from all of them, until two of them close the engine.
void everything_at_once(BackendKind kind, uint64_t seed) {
    EngineOptions options = options_for(kind);
    options.faults = harmful(seed);
    options.threads = 1 + static_cast<uint32_t>(seed % 3);
    options.single_submit = seed % 2 == 1;
    options.overlap_events = seed % 3 != 1;
    Engine engine(options);
    const auto slab = std::make_shared<Slab>(4 * Caller::kMemory);
    const auto file = open_file(directory / "at_once", seed % 4 != 3);
    std::atomic<int> turns{0};
    std::atomic<bool> closed{false};
    std::vector<Caller> callers;
    for (uint64_t i = 0; i < 4; ++i)
        callers.emplace_back(engine, file, slab->data() + i * Caller::kMemory, i, turns);

    std::vector<std::thread> threads;
    for (Caller& caller : callers) threads.emplace_back(std::ref(caller));
    threads.emplace_back([&engine, &slab] {
        try {
            for (;;) {
                engine.register_slab(slab);
                engine.register_slab(std::make_shared<Slab>(1));
                engine.unregister_slab(slab.get());
            }
        } catch (const StateError&) {
        }
    });
    std::vector<uint64_t> taken;
    threads.emplace_back([&engine, &taken, &closed] {
        for (bool last = false; !last;) {
            last = closed;  // before it looks: what closing completed is there now
            for (const auto& transfer : engine.take_finished()) taken.push_back(transfer->key());
            std::this_thread::yield();
        }
    });
    while (turns < 20) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::thread other([&engine] { engine.close(); });
    engine.close();
    closed = true;
    other.join();
    for (std::thread& thread : threads) thread.join();

    std::vector<uint64_t> started;
    for (const Caller& caller : callers) {
        started.insert(started.end(), caller.keys.begin(), caller.keys.end());
        for (const auto& transfer : caller.transfers) {
            CHECK(transfer->done());
            const int error = error_of(*transfer);
            CHECK(error == 0 || error == EIO ||
                  (error == ENODATA && transfer->operation() == Operation::kRead));
        }
    }
    std::sort(started.begin(), started.end());
    std::sort(taken.begin(), taken.end());
    CHECK(taken == started);  // each once
}

void many_wait_for_one(BackendKind kind) {
    EngineOptions options = options_for(kind);
    options.faults = std::make_shared<FaultPlan>();
    options.faults->delay_us = 3000;
    auto engine = std::make_unique<Engine>(options);
    const Slab slab(2 << 20);
    for (const uint64_t misalignment : {0, 3}) {
        options.faults->fail_write_at = misalignment == 0 ? 0 : 1;
        auto transfer = engine->start(Operation::kWrite, open_file(directory / "one"),
                                      slab.data() + misalignment, 20 * kBlock, 0);
        std::vector<std::thread> threads;
        for (int64_t i = 0; i < 4; ++i) {
            threads.emplace_back([transfer, i, expected = misalignment == 0 ? 0 : EIO] {
                while (!transfer->wait(i)) {
                }
                CHECK(error_of(*transfer) == expected);
            });
        }
        transfer.reset();
        for (std::thread& thread : threads) thread.join();
    }
    std::thread([&engine] { engine.reset(); }).join();  // not on the thread that made it
}

// In the child nothing works and nothing is ended; the parent's transfers do not notice.
void child_leaves_the_engine_alone(BackendKind kind) {
    EngineOptions options = options_for(kind);
    options.faults = std::make_shared<FaultPlan>();
    options.faults->delay_us = 3000;
    auto engine = std::make_unique<Engine>(options);
    auto slab = std::make_shared<Slab>(2 << 20);
    const auto file = open_file(directory / "fork");
    fill(slab->data(), 20 * kBlock, 1);
    engine->register_slab(slab);
    const auto transfer = engine->start(Operation::kWrite, file, slab->data(), 20 * kBlock, 0);
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_THROWS(StateError, engine->start(Operation::kWrite, file, slab->data(), 1, 0));
        CHECK_THROWS(StateError, engine->take_finished());
        CHECK_THROWS(StateError, engine->register_slab(slab));
        CHECK_THROWS(StateError, engine->close());
        engine.reset();
        slab.reset();
        ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(wait(*transfer) == 20 * kBlock);
    char* const target = slab->data() + (1 << 20);
    CHECK(wait(*engine->start(Operation::kRead, file, target, 20 * kBlock, 0)) == 20 * kBlock);
    CHECK(std::memcmp(slab->data(), target, 20 * kBlock) == 0);
}

// The ring's descriptor is replaced while threads use it: every transfer ends, in one way or the other.
void broken_ring_ends_every_transfer() {
    EngineOptions options = options_for(BackendKind::kUring);
    options.threads = 1;
    const auto rings = [] {
        std::vector<int> found;
        std::error_code ignored;
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
            const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
            if (target.find("io_uring") != std::string::npos)
                found.push_back(std::stoi(entry.path().filename()));
        }
        return found;
    };
    CHECK(rings().empty());
    const auto slab = std::make_shared<Slab>(4 * Caller::kMemory);
    Engine engine(options);
    const std::vector<int> ring = rings();
    CHECK(ring.size() == 1);
    const auto file = open_file(directory / "broken");
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < 4; ++i) {
        threads.emplace_back([&engine, &file, &slab, i] {
            try {
                for (;;) {
                    error_of(*engine.start(Operation::kWrite, file, slab->data() + i * Caller::kMemory,
                                           9 * kBlock, i * 9 * kBlock));
                    if (i == 0) engine.register_slab(slab);
                    if (i == 1) engine.unregister_slab(slab.get());
                }
            } catch (const IoError& error) {
                CHECK(error.operation == "io_uring_enter");
            }
        });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const swapper::UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    // By raw system call: that others use the descriptor meanwhile is the test, not a race to report.
    CHECK(::syscall(SYS_dup3, null.get(), ring[0], O_CLOEXEC) == ring[0]);
    for (std::thread& thread : threads) thread.join();
    CHECK_THROWS(IoError, engine.register_slab(slab));
    engine.unregister_slab(slab.get());
    engine.close();
}

void wrong_options_are_refused() {
    const auto refused = [](uint64_t block, uint32_t depth, uint32_t threads) {
        EngineOptions options;
        options.block_bytes = block;
        options.queue_depth = depth;
        options.threads = threads;
        CHECK_THROWS(IoError, Engine(options));
    };
    for (const uint64_t block : {uint64_t{0}, uint64_t{5000}, uint64_t{2} << 30}) refused(block, 1, 1);
    for (const uint32_t depth : {0U, 5000U}) refused(4096, depth, 1);
    for (const uint32_t threads : {0U, 300U}) refused(4096, 1, threads);
    for (const uint64_t length : {uint64_t{0}, uint64_t{1} << 63}) CHECK_THROWS(IoError, Slab(length));
}

void run(BackendKind kind) {
    for (const bool direct : {true, false}) {
        round_trips(kind, nullptr, direct);
        for (uint64_t seed = 0; seed < 3; ++seed) {
            const auto faults = harmful(seed);
            faults->eio = 0;
            round_trips(kind, faults, direct);
        }
        checksums_are_checked(kind, direct);
    }
    callers_share_an_engine(kind);
    failures_are_reported(kind);
    close_drains(kind);
    backend_ends_with_requests_in_flight(kind);
    for (uint64_t seed = 0; seed < 6; ++seed) everything_at_once(kind, seed);
    many_wait_for_one(kind);
    child_leaves_the_engine_alone(kind);
    if (kind == BackendKind::kUring) broken_ring_ends_every_transfer();
}

}  // namespace

int main() {
    const struct {
        BackendKind kind;
        const char* name;
    } kinds[] = {
        {BackendKind::kThreads, "threads"}, {BackendKind::kAio, "aio"}, {BackendKind::kUring, "uring"}};
    wrong_options_are_refused();
    for (const auto& [kind, kind_name] : kinds) {
        const std::string reason = swapper::probe_backend(kind, false);
        if (reason.empty()) run(kind);
        std::printf("engine over %s: %s\n", kind_name,
                    reason.empty() ? "passed" : ("skipped, " + reason).c_str());
    }
    return 0;
}
