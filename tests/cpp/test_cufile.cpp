// cuFile's backend over the calls of tests/mock_cufile.cpp, whose device memory is the host's.
#include "cufile.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "engine.h"

using swapper::BackendKind;
using swapper::CuFile;
using swapper::DeviceTarget;
using swapper::Engine;
using swapper::EngineOptions;
using swapper::FaultPlan;
using swapper::IoError;
using swapper::Operation;
using swapper::RegisteredFile;
using swapper::RegisteredMemory;
using swapper::Transfer;

namespace {

constexpr uint64_t kBlock = 16384;
constexpr uint64_t kLength = 10 * kBlock + 4096;
const TemporaryDirectory directory;

int error_of(const Transfer& transfer) {
    while (!transfer.wait(1000)) {
    }
    return transfer.failed() ? transfer.error().code : 0;
}

// Every file registered and given up again and again, memory registered while others move; failures in
// between.
void callers_share_an_engine(const std::shared_ptr<const CuFile>& library, uint64_t seed) {
    EngineOptions options;
    options.backend = BackendKind::kCuFile;
    options.block_bytes = kBlock;
    options.queue_depth = 4;
    options.threads = 1 + static_cast<uint32_t>(seed % 2);
    if (seed > 0) {
        options.faults = std::make_shared<FaultPlan>();
        options.faults->seed = seed;
        options.faults->short_transfer = 0.2;
        options.faults->eio = 0.02;
        options.faults->eagain = 0.02;
        options.faults->delay_us = 100;
        options.faults->reorder = true;
    }
    Engine engine(options);
    std::vector<std::thread> threads;
    for (uint64_t caller = 0; caller < 4; ++caller) {
        threads.emplace_back([&, caller] {
            std::vector<char> source(kLength);
            std::vector<char> target(kLength);
            for (uint64_t turn = 0; turn < 20; ++turn) {
                const auto plain = open_file(directory / std::to_string(caller));
                const auto file = std::make_shared<RegisteredFile>(library, plain, -1);
                const RegisteredMemory memory(library, source.data(), kLength, -1);
                CHECK_THROWS(IoError, RegisteredMemory(library, source.data(), kLength, -1));
                fill(source.data(), kLength, caller + turn);
                const DeviceTarget from{file, turn % 2 == 0 ? source.data() : nullptr, -1};
                const DeviceTarget to{file, nullptr, -1};
                const int written =
                    error_of(*engine.start_on_device(Operation::kWrite, from, source.data(), kLength, 4096));
                const auto reading =
                    engine.start_on_device(Operation::kRead, to, target.data(), kLength, 4096);
                const int read = error_of(*reading);
                CHECK(file.use_count() == 3);  // a transfer that is over does not hold it
                for (const int error : {written, read}) CHECK(error == 0 || (error == EIO && seed > 0));
                if (written == 0 && read == 0) CHECK(source == target);
                if (written == 0)
                    CHECK(error_of(*engine.start_on_device(Operation::kRead, to, target.data(), kLength,
                                                           kBlock)) != 0);  // past the end
                CHECK_THROWS(std::invalid_argument,
                             engine.start_on_device(Operation::kRead, to, target.data(), 100, 0));
                std::fill(target.begin(), target.end(), '\0');
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    engine.close();
}

}  // namespace

int main() {
    CHECK_THROWS(IoError, CuFile::load({"./no-such-library.so", "libm.so.6"}));
    const auto library = CuFile::load({"./libmock_cufile.so"});
    CHECK(library == CuFile::load({"./libmock_cufile.so"}));
    CHECK(library->version() == 1150 && library->open_driver().empty() &&
          library->properties()->nvfs_major == 2);
    if (!open_file(directory / "probe")->direct()) {
        std::puts("cufile: skipped, no O_DIRECT");
        return 0;
    }
    for (uint64_t seed = 0; seed < 4; ++seed) callers_share_an_engine(library, seed);
    void* const mock = ::dlopen("./libmock_cufile.so", RTLD_NOW | RTLD_LOCAL);
    const auto count = reinterpret_cast<long (*)(const char*)>(::dlsym(mock, "mock_get"));
    CHECK(count("open_handles") == 0 && count("open_buffers") == 0 && count("registered") == 4 * 4 * 20);
    std::puts("cufile: passed");
    return 0;
}
