#include "codec.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "codec_tiles.h"

namespace swapper {
namespace {

using namespace codec;

// Starting a thread takes about as long as this many elements.
constexpr std::size_t kNumelPerThreadMin = std::size_t{1} << 19;

// The loops above, compiled once for each instruction set. (Not `target_clones`: its resolvers run before the
// run-time of a sanitizer is up, and not every C library has them.)
struct Kernels {
    decltype(&split_piece) split;
    decltype(&count_ties) count;
    void (*join)(const Byte*, const Byte*, const Byte*, std::size_t, Byte*, std::size_t);
};

#define CODEC_VARIANT(name, ...)                                                                            \
    struct name {                                                                                           \
        __VA_ARGS__ static void split(const Byte* master, Byte* param, Byte* low, std::size_t numel,        \
                                      PieceTies& ties) {                                                    \
            split_piece(master, param, low, numel, ties);                                                   \
        }                                                                                                   \
        __VA_ARGS__ static std::size_t count(const Byte* low, std::size_t numel) {                          \
            return count_ties(low, numel);                                                                  \
        }                                                                                                   \
        __VA_ARGS__ static void join(const Byte* param, const Byte* low, const Byte* ties, std::size_t bit, \
                                     Byte* master, std::size_t numel) {                                     \
            (void)join_piece(param, low, ties, bit, master, numel);                                         \
        }                                                                                                   \
        static constexpr Kernels kernels() { return {split, count, join}; }                                 \
    }

CODEC_VARIANT(Baseline, );
#if defined(__x86_64__)
CODEC_VARIANT(Avx2, CODEC_AVX2);
CODEC_VARIANT(Avx512, CODEC_AVX512);
#endif

Kernels kernels(InstructionSet set) {
#if defined(__x86_64__)
    if (set == InstructionSet::kAvx512) return Avx512::kernels();
    if (set == InstructionSet::kAvx2) return Avx2::kernels();
#endif
    static_cast<void>(set);
    return Baseline::kernels();
}

// Pieces of `numel` elements, handed out in order, each to whichever thread asks next; and the bits that
// pass from each piece to the next, which makes the result the same for any number of threads.
class Pieces {
  public:
    explicit Pieces(std::size_t numel) : numel_(numel) {}

    // The next piece nobody has; false when there is none.
    bool take(std::size_t& piece, std::size_t& offset, std::size_t& length) {
        piece = next_.fetch_add(1, std::memory_order_relaxed);
        offset = piece * kPieceNumel;
        if (offset >= numel_) return false;
        length = std::min(kPieceNumel, numel_ - offset);
        return true;
    }

    // The ties of all pieces before `piece`. Waits until their threads have called `end_turn`: soon, since
    // they took theirs earlier and do nothing between but one piece's work.
    std::size_t begin_turn(std::size_t piece) const {
        while (turn_.load(std::memory_order_acquire) != piece) std::this_thread::yield();
        return ties_;
    }
    void end_turn(std::size_t piece, std::size_t ties) {
        ties_ += ties;
        turn_.store(piece + 1, std::memory_order_release);
    }

    // Runs `work` on up to `threads` threads, this one among them, and returns when all have ended.
    void run(unsigned threads, const std::function<void()>& work) const {
        const std::size_t useful = std::min<std::size_t>(threads, numel_ / kNumelPerThreadMin);
        std::vector<std::thread> others;
        others.reserve(useful);
        try {
            for (std::size_t i = 1; i < useful; ++i) others.emplace_back(std::cref(work));
        } catch (const std::exception&) {
            // No more threads to be had: those there are take all pieces.
        }
        work();
        for (auto& other : others) other.join();
    }

    // After run(): the ties of all pieces.
    std::size_t ties() const { return ties_; }

  private:
    const std::size_t numel_;
    std::atomic<std::size_t> next_{0};
    std::atomic<std::size_t> turn_{0};
    std::size_t ties_ = 0;
};

}  // namespace

std::size_t split_master(const void* master, void* param, void* low, void* ties, std::size_t numel,
                         unsigned threads, InstructionSet set) {
    Pieces pieces(numel);
    pieces.run(threads, [&, split = kernels(set).split] {
        std::size_t piece = 0;
        std::size_t offset = 0;
        std::size_t length = 0;
        while (pieces.take(piece, offset, length)) {
            PieceTies piece_ties;
            split(static_cast<const Byte*>(master) + 4 * offset, static_cast<Byte*>(param) + 2 * offset,
                  static_cast<Byte*>(low) + 2 * offset, length, piece_ties);
            piece_ties.copy_to(static_cast<Byte*>(ties), pieces.begin_turn(piece));
            pieces.end_turn(piece, piece_ties.bits());
        }
    });
    return pieces.ties();
}

void join_master(const void* param, const void* low, const void* ties, std::size_t tie_bits, void* master,
                 std::size_t numel, unsigned threads, InstructionSet set) {
    Pieces pieces(numel);
    pieces.run(threads, [&, kernel = kernels(set)] {
        std::size_t piece = 0;
        std::size_t offset = 0;
        std::size_t length = 0;
        while (pieces.take(piece, offset, length)) {
            const auto* piece_low = static_cast<const Byte*>(low) + 2 * offset;
            const std::size_t count = kernel.count(piece_low, length);
            const std::size_t first = pieces.begin_turn(piece);
            pieces.end_turn(piece, count);
            if (first + count > tie_bits) continue;  // refused below; these bits are not there to be read
            kernel.join(static_cast<const Byte*>(param) + 2 * offset, piece_low,
                        static_cast<const Byte*>(ties), first, static_cast<Byte*>(master) + 4 * offset,
                        length);
        }
    });
    if (pieces.ties() != tie_bits) {
        throw std::invalid_argument("the low halves have " + std::to_string(pieces.ties()) + " ties, not " +
                                    std::to_string(tie_bits));
    }
}

}  // namespace swapper
