#include "prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <future>
#include <vector>

namespace swapper {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE; older headers lack it

// Starting a thread takes about as long as this many bytes.
constexpr std::size_t kLengthPerThreadMin = std::size_t{1} << 20;

}  // namespace

void prefault(void* data, std::size_t length, unsigned threads) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    // Whole pages only: those at the edges belong to others too.
    const std::size_t skipped = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
    if (length < skipped + page) return;
    char* const start = static_cast<char*>(data) + skipped;
    const std::size_t pages = (length - skipped) / page;
    const std::size_t parts =
        std::max<std::size_t>(std::min<std::size_t>(threads, length / kLengthPerThreadMin), 1);
    const std::size_t part = pages / parts;
    std::vector<std::future<void>> others;
    others.reserve(parts - 1);
    for (std::size_t i = 1; i < parts; ++i) {
        char* const from = start + i * part * page;
        const std::size_t count = i + 1 < parts ? part : pages - i * part;
        others.push_back(std::async(std::launch::async | std::launch::deferred,
                                    [=] { (void)::madvise(from, count * page, kPopulateWrite); }));
    }
    (void)::madvise(start, (parts > 1 ? part : pages) * page, kPopulateWrite);
    for (auto& other : others) other.get();
}

}  // namespace swapper
