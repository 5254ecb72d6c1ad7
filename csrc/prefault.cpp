#include "prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "crew.h"

namespace swapper {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE; older headers lack it

// What a thread takes at once. To wake one takes about as long as the kernel needs for half of that.
constexpr std::size_t kPart = std::size_t{256} << 10;

std::size_t page_length() {
    static const auto length = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return length;
}

// Whole pages only: those at the edges belong to others too.
struct Pages {
    Pages(void* data, std::size_t length) {
        const std::size_t page = page_length();
        const std::size_t skipped = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
        start = static_cast<char*>(data) + skipped;
        bytes = length < skipped ? 0 : (length - skipped) / page * page;
    }
    char* start;
    std::size_t bytes;
};

}  // namespace

void prefault(void* data, std::size_t length, unsigned threads) {
    const Pages pages(data, length);
    std::atomic<std::size_t> next{0};
    run_on_crew(std::min<std::size_t>(threads, (pages.bytes + kPart - 1) / kPart), [&] {
        for (std::size_t at = 0; (at = next.fetch_add(kPart)) < pages.bytes;) {
            (void)::madvise(pages.start + at, std::min(kPart, pages.bytes - at), kPopulateWrite);
        }
    });
}

void prefault_huge(void* data, std::size_t length) {
    // The pages at the edges too, so that neighbours stay one mapping. Nothing is brought of them, and their
    // content stays.
    const std::size_t before = reinterpret_cast<std::uintptr_t>(data) % page_length();
    const std::size_t whole = (before + length + page_length() - 1) / page_length() * page_length();
    (void)::madvise(static_cast<char*>(data) - before, whole, MADV_HUGEPAGE);
    const Pages pages(data, length);
    if (pages.bytes != 0) (void)::madvise(pages.start, pages.bytes, kPopulateWrite);
}

}  // namespace swapper
