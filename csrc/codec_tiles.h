// The loops of codec.h over short runs of elements, for whoever compiles them for an instruction set.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tie bits are packed through little-endian words");

#define CODEC_INLINE inline __attribute__((always_inline))

// What loops are compiled for beside the processor that every compiler knows. Without the preference gcc
// makes no vectors of 512 bits; clang does, and ignores all of a target in which it does not know a word.
#if defined(__clang__)
#define CODEC_WIDE_VECTORS ""
#else
#define CODEC_WIDE_VECTORS ",prefer-vector-width=512"
#endif
#define CODEC_AVX2 __attribute__((target("avx2")))
#define CODEC_AVX512 __attribute__((target("avx2,avx512f,avx512bw,avx512vl,avx512dq" CODEC_WIDE_VECTORS)))

namespace swapper::codec {

using Byte = unsigned char;

// Threads take pieces of this many elements: the 256 KiB of its param, low and master stay in the L2 cache,
// where join reads low a second time.
constexpr std::size_t kPieceNumel = std::size_t{1} << 15;

// The main loops do so many elements without a branch, then look whether one of them was a tie.
constexpr std::size_t kBlockNumel = 64;

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

// Param and low of `numel` masters, none of which is a tie or a NaN; else they are rubbish, and it returns
// true.
CODEC_INLINE bool split_usual(const Byte* __restrict master, Byte* __restrict param, Byte* __restrict low,
                              std::size_t numel) {
    std::uint32_t others = 0;
    for (std::size_t i = 0; i < numel; ++i) {
        const std::uint32_t value = load32(master, i);
        store16(param, i, (value + kTie) >> 16);
        store16(low, i, value);
        others |=
            static_cast<std::uint32_t>((value & 0xFFFF) == kTie) | static_cast<std::uint32_t>(is_nan(value));
    }
    return others != 0;
}

// Param and low of `numel` masters.
CODEC_INLINE void split_any(const Byte* __restrict master, Byte* __restrict param, Byte* __restrict low,
                            std::size_t numel) {
    for (std::size_t i = 0; i < numel; ++i) {
        const std::uint32_t value = load32(master, i);
        const std::uint32_t rounded = (value + 0x7FFF + (value >> 16 & 1)) >> 16;
        store16(param, i, is_nan(value) ? 0x7FC0 : rounded);
        store16(low, i, is_nan(value) ? 0 : value);
    }
}

CODEC_INLINE void split_piece(const Byte* master, Byte* param, Byte* low, std::size_t numel,
                              PieceTies& ties) {
    for (std::size_t i = 0; i < numel; i += kBlockNumel) {
        const std::size_t count = std::min(kBlockNumel, numel - i);
        const bool is_whole = count == kBlockNumel;  // a length that the compiler knows
        if (is_whole && !split_usual(master + 4 * i, param + 2 * i, low + 2 * i, kBlockNumel)) continue;
        split_any(master + 4 * i, param + 2 * i, low + 2 * i, count);
        ties.append(master + 4 * i, count);
    }
}

CODEC_INLINE std::size_t count_ties(const Byte* low, std::size_t numel) {
    std::size_t count = 0;
    for (std::size_t begin = 0; begin < numel; begin += kPieceNumel) {
        const std::size_t end = std::min(begin + kPieceNumel, numel);
        std::uint16_t here = 0;  // at most kPieceNumel; so short, a vector has as many as of its elements
        for (std::size_t i = begin; i < end; ++i) {
            here = static_cast<std::uint16_t>(here + static_cast<std::uint16_t>(load16(low, i) == kTie));
        }
        count += here;
    }
    return count;
}

// Masters of `numel` elements, with every tie as if its bit were 0. Returns whether there is one.
CODEC_INLINE bool join_block(const Byte* __restrict param, const Byte* __restrict low,
                             Byte* __restrict master, std::size_t numel) {
    std::uint16_t ties = 0;
    for (std::size_t i = 0; i < numel; ++i) {
        const std::uint16_t half = load16(low, i);
        const auto tie = static_cast<std::uint16_t>(half == kTie);
        store16(master, 2 * i, half);
        store16(master, 2 * i + 1, static_cast<std::uint32_t>(load16(param, i)) - (half >> 15) + tie);
        ties = static_cast<std::uint16_t>(ties | tie);
    }
    return ties != 0;
}

// Takes the ties' bits, from bit `bit` on, off their masters. Returns the next bit.
inline std::size_t join_ties(const Byte* low, const Byte* ties, std::size_t bit, Byte* master,
                             std::size_t numel) {
    for (std::size_t i = 0; i < numel; ++i) {
        if (load16(low, i) != kTie) continue;
        const std::uint32_t down = ties[bit / 8] >> (bit % 8) & 1;
        store32(master, i, load32(master, i) - (down << 16));
        ++bit;
    }
    return bit;
}

// Masters of `numel` elements, whose ties begin at bit `bit`. Returns the next bit.
CODEC_INLINE std::size_t join_piece(const Byte* param, const Byte* low, const Byte* ties, std::size_t bit,
                                    Byte* master, std::size_t numel) {
    std::size_t i = 0;
    for (; i + kBlockNumel <= numel; i += kBlockNumel) {
        if (join_block(param + 2 * i, low + 2 * i, master + 4 * i, kBlockNumel)) {
            bit = join_ties(low + 2 * i, ties, bit, master + 4 * i, kBlockNumel);
        }
    }
    if (join_block(param + 2 * i, low + 2 * i, master + 4 * i, numel - i)) {
        bit = join_ties(low + 2 * i, ties, bit, master + 4 * i, numel - i);
    }
    return bit;
}

}  // namespace swapper::codec
