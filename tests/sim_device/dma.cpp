// What a driver does that moves bytes between the device and something else without a kernel, as cuFile does:
// it writes to the bytes behind the addresses of the device, whenever it likes. No stream knows of it.
#include <torch/library.h>

#include <tuple>

#include "world.h"

namespace sim {
namespace {

// Start and length of all addresses of devices, and how far behind them their bytes are.
std::tuple<int64_t, int64_t, int64_t> dma_window() {
    const Entered world;
    const char* const start = world->memory.addresses();
    const char* const bytes = static_cast<const char*>(world->memory.bytes(start));
    return {reinterpret_cast<int64_t>(start), static_cast<int64_t>(kAddresses), bytes - start};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sim, m) {
    m.def("dma_window() -> (int, int, int)", dma_window);
}

}  // namespace sim
