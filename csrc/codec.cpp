#include "codec.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tie bits are packed through little-endian words");

#define CODEC_INLINE inline __attribute__((always_inline))

namespace swapper {
namespace {

using Byte = unsigned char;

// Threads take pieces of this many elements: the 256 KiB of its param, low and master stay in the L2 cache,
// where join reads low a second time.
constexpr std::size_t kPieceNumel = std::size_t{1} << 15;

// The main loops do so many elements without a branch, then look whether one of them was a tie.
constexpr std::size_t kBlockNumel = 64;

// Starting a thread takes about as long as this many elements.
constexpr std::size_t kNumelPerThreadMin = std::size_t{1} << 18;

constexpr std::uint32_t kTie = 0x8000;

// Elements are loaded and stored one by one through memcpy, at any alignment; the compiler makes vectors of
// it.
CODEC_INLINE std::uint32_t load32(const Byte* data, std::size_t i) {
    std::uint32_t value = 0;
    std::memcpy(&value, data + 4 * i, 4);
    return value;
}
CODEC_INLINE std::uint16_t load16(const Byte* data, std::size_t i) {
    std::uint16_t value = 0;
    std::memcpy(&value, data + 2 * i, 2);
    return value;
}
CODEC_INLINE void store32(Byte* data, std::size_t i, std::uint32_t value) {
    std::memcpy(data + 4 * i, &value, 4);
}
CODEC_INLINE void store16(Byte* data, std::size_t i, std::uint32_t value) {
    const auto half = static_cast<std::uint16_t>(value);
    std::memcpy(data + 2 * i, &half, 2);
}

CODEC_INLINE bool is_nan(std::uint32_t master) {
    return (master & 0x7FFFFFFF) > 0x7F800000;
}

// The tie bits of one piece, from bit 0.
class PieceTies {
  public:
    // Takes the ties among `numel` masters, without branching on them: one in eight may be one.
    void append(const Byte* master, std::size_t numel) {
        for (std::size_t begin = 0; begin < numel; begin += 32) {
            const std::size_t end = std::min(begin + 32, numel);
            for (std::size_t i = begin; i < end; ++i) {
                const std::uint32_t value = load32(master, i);
                const auto tie = static_cast<unsigned>(((value & 0xFFFF) == kTie) & !is_nan(value));
                open_ |= static_cast<std::uint64_t>(tie & (value >> 16) & 1) << open_bits_;
                open_bits_ += tie;
            }
            // At most 7 + 32 bits are open. Whole bytes go; what lies past them is overwritten.
            std::memcpy(bytes_.data() + closed_bytes_, &open_, 8);
            closed_bytes_ += open_bits_ / 8;
            open_ >>= open_bits_ / 8 * 8;
            open_bits_ %= 8;
        }
    }

    std::size_t bits() const { return closed_bytes_ * 8 + open_bits_; }

    // Appends to the `bits_before` bits at `ties`. Writes no byte past the last bit.
    void copy_to(Byte* ties, std::size_t bits_before) const {
        const std::size_t count = bits();
        const unsigned shift = bits_before % 8;
        Byte* out = ties + bits_before / 8;
        unsigned carry = shift != 0 ? *out : 0;
        for (std::size_t done = 0; done < count + shift; done += 8, ++out) {
            // A last round may be there for the carry alone.
            const unsigned next = done < count ? bytes_[done / 8] : 0;
            *out = static_cast<Byte>(carry | next << shift);
            carry = next >> (8 - shift);
        }
    }

  private:
    std::array<Byte, kPieceNumel / 8 + 8> bytes_;
    std::uint64_t open_ = 0;
    unsigned open_bits_ = 0;
    std::size_t closed_bytes_ = 0;
};

// Param and low of `numel` masters. Returns whether one may be a tie (a NaN may look like one).
CODEC_INLINE bool split_block(const Byte* __restrict master, Byte* __restrict param, Byte* __restrict low,
                              std::size_t numel) {
    std::uint32_t ties = 0;
    for (std::size_t i = 0; i < numel; ++i) {
        const std::uint32_t value = load32(master, i);
        const std::uint32_t rounded = (value + 0x7FFF + (value >> 16 & 1)) >> 16;
        store16(param, i, is_nan(value) ? 0x7FC0 : rounded);
        store16(low, i, is_nan(value) ? 0 : value);
        ties |= static_cast<std::uint32_t>((value & 0xFFFF) == kTie);
    }
    return ties != 0;
}

CODEC_INLINE void split_piece(const Byte* master, Byte* param, Byte* low, std::size_t numel,
                              PieceTies& ties) {
    std::size_t i = 0;
    for (; i + kBlockNumel <= numel; i += kBlockNumel) {
        if (split_block(master + 4 * i, param + 2 * i, low + 2 * i, kBlockNumel))
            ties.append(master + 4 * i, kBlockNumel);
    }
    if (split_block(master + 4 * i, param + 2 * i, low + 2 * i, numel - i))
        ties.append(master + 4 * i, numel - i);
}

CODEC_INLINE std::size_t count_ties(const Byte* low, std::size_t numel) {
    std::uint32_t count = 0;
    for (std::size_t i = 0; i < numel; ++i) count += static_cast<std::uint32_t>(load16(low, i) == kTie);
    return count;
}

// Masters of `numel` elements, with every tie as if its bit were 0. Returns whether there is one.
CODEC_INLINE bool join_block(const Byte* __restrict param, const Byte* __restrict low,
                             Byte* __restrict master, std::size_t numel) {
    std::uint32_t ties = 0;
    for (std::size_t i = 0; i < numel; ++i) {
        const std::uint32_t half = load16(low, i);
        const std::uint32_t high = load16(param, i) - static_cast<std::uint32_t>(half > kTie);
        store32(master, i, high << 16 | half);
        ties |= static_cast<std::uint32_t>(half == kTie);
    }
    return ties != 0;
}

// Takes the ties' bits, from bit `bit` on, off their masters. Returns the next bit.
std::size_t join_ties(const Byte* low, const Byte* ties, std::size_t bit, Byte* master, std::size_t numel) {
    for (std::size_t i = 0; i < numel; ++i) {
        if (load16(low, i) != kTie) continue;
        const std::uint32_t down = ties[bit / 8] >> (bit % 8) & 1;
        store32(master, i, load32(master, i) - (down << 16));
        ++bit;
    }
    return bit;
}

CODEC_INLINE void join_piece(const Byte* param, const Byte* low, const Byte* ties, std::size_t bit,
                             Byte* master, std::size_t numel) {
    std::size_t i = 0;
    for (; i + kBlockNumel <= numel; i += kBlockNumel) {
        if (join_block(param + 2 * i, low + 2 * i, master + 4 * i, kBlockNumel)) {
            bit = join_ties(low + 2 * i, ties, bit, master + 4 * i, kBlockNumel);
        }
    }
    if (join_block(param + 2 * i, low + 2 * i, master + 4 * i, numel - i)) {
        join_ties(low + 2 * i, ties, bit, master + 4 * i, numel - i);
    }
}

// The loops above, compiled once for each instruction set and chosen when first used. (Not `target_clones`:
// its resolvers run before the run-time of a sanitizer is up, and not every C library has them.)
struct Kernels {
    decltype(&split_piece) split;
    decltype(&count_ties) count;
    decltype(&join_piece) join;
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
            join_piece(param, low, ties, bit, master, numel);                                               \
        }                                                                                                   \
        static constexpr Kernels kernels() { return {split, count, join}; }                                 \
    }

CODEC_VARIANT(Baseline, );
#if defined(__x86_64__)
CODEC_VARIANT(Avx2, __attribute__((target("avx2"))));
CODEC_VARIANT(Avx512, __attribute__((target("avx512f,avx512bw,avx512vl"))));
#endif

Kernels choose_kernels() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) return Avx512::kernels();
    if (__builtin_cpu_supports("avx2")) return Avx2::kernels();
#endif
    return Baseline::kernels();
}

const Kernels& kernels() {
    static const Kernels chosen = choose_kernels();
    return chosen;
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
                         unsigned threads) {
    Pieces pieces(numel);
    pieces.run(threads, [&, split = kernels().split] {
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
                 std::size_t numel, unsigned threads) {
    Pieces pieces(numel);
    pieces.run(threads, [&, kernel = kernels()] {
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
