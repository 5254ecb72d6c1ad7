#include "int8_codec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "codec_tiles.h"

namespace swapper {
namespace {

using codec::Byte;
using codec::load32;
using codec::store32;
using rounding::GroupBits;
using rounding::in_pieces;
using rounding::kGroupNumel;

static_assert(kGroupNumel % kBlockNumel == 0, "the random bits of a block are of one group");

constexpr std::int32_t kInfinity = 0x7F800000;  // as bits of fp32; above it are NaNs
constexpr std::int32_t kNan = 0x7FC00000;
constexpr std::uint32_t kSign = 0x80000000;
constexpr int kMantissaBits = 23;

// Windows.
constexpr int kShiftMin = 8;
constexpr int kShiftMax = 20;
constexpr std::int32_t kLevels = 253;
constexpr std::int32_t kWindowInfinity = 254;
constexpr std::int32_t kWindowNan = 255;

// Linear codes.
constexpr std::int32_t kUnitsMax = 125;
constexpr std::int32_t kLinearInfinity = 126;
constexpr std::int32_t kLinearNan = 127;
// The significand of 125, and what it adds to the exponent of the unit.
constexpr std::int32_t kUnitsMaxMantissa = 0x7A0000;
constexpr std::int32_t kUnitsMaxExponent = 6;
// Of the unit 2**122, whose 64 is infinite already.
constexpr std::int32_t kLastExponent = 127 + 122;
constexpr std::int32_t kLastUnitsMax = 63;
// Bits of the fraction of a unit; 7 more for the units, and one is the sign's.
constexpr int kFractionBits = 24;

// Bits of fp32 without their sign, or codes: never negative, since instruction sets compare signed integers.
using Block = std::array<std::int32_t, kBlockNumel>;

// What decides how a block is stored: of its finite values that are not zero, the smallest and largest
// magnitude, as bits, 0 if there is none; and whether any value but a NaN has a sign.
struct Range {
    std::int32_t low;
    std::int32_t high;
    bool is_signed;
};

// All bits, or none. The compiler makes no vectors of a reduction of what it can turn into branches.
CODEC_INLINE std::int32_t mask_of(bool condition) {
    return -static_cast<std::int32_t>(condition);
}

CODEC_INLINE Range range_of(const Block& magnitudes, const Block& signs) {
    std::int32_t low = std::numeric_limits<std::int32_t>::max();
    std::int32_t high = 0;
    std::int32_t any = 0;
    for (std::size_t i = 0; i < kBlockNumel; ++i) {
        const std::int32_t magnitude = magnitudes[i];
        const std::int32_t finite = magnitude & mask_of(magnitude < kInfinity);
        high = std::max(high, finite);
        low = std::min(low, (finite - 1) & std::numeric_limits<std::int32_t>::max());  // of zero the largest
        any |= signs[i] & mask_of(magnitude <= kInfinity);
    }
    return {high == 0 ? 0 : low + 1, high, any != 0};
}

// The level of the bits `low`, and the first at or above `high`.
struct Window {
    int shift;
    std::int32_t base;
};

CODEC_INLINE std::int32_t level_above(std::int32_t bits, int shift) {
    const std::int32_t top = (bits + (1 << shift) - 1) >> shift;
    return std::min(top, (kInfinity - 1) >> shift);
}

// The finest window that holds what is from `low` to `high`, or of the coarsest the one that ends at `high`.
inline Window window_of(std::int32_t low, std::int32_t high) {
    int shift = kShiftMin;
    while (shift < kShiftMax && level_above(high, shift) - (low >> shift) >= kLevels) ++shift;
    return {shift, std::max({low >> shift, level_above(high, shift) - (kLevels - 1), 1})};
}

CODEC_INLINE std::uint32_t encode_window(const Block& magnitudes, const Block& random, const Range& range,
                                         Block& codes) {
    const Window first = window_of(range.low, range.high);
    // The random number is a fraction of a level, of 16 bits: cut where a level has fewer, and in the middle
    // of what it stands for where a level has more.
    const int shift = first.shift;
    const int left = std::max(shift - 16, 0);
    const int right = std::max(16 - shift, 0);
    const std::int32_t middle = (1 << left) >> 1;
    std::int32_t low = std::numeric_limits<std::int32_t>::max();
    std::int32_t high = 0;
    for (std::size_t i = 0; i < kBlockNumel; ++i) {
        const std::int32_t magnitude = magnitudes[i];
        const std::int32_t has_level = mask_of(magnitude != 0) & mask_of(magnitude < kInfinity);
        const std::int32_t below = magnitude >> shift;
        // Sums of NaNs and infinities may wrap, and are not used.
        const auto sum = static_cast<std::uint32_t>(magnitude) +
                         static_cast<std::uint32_t>(((random[i] << left) >> right) + middle);
        const auto drawn = static_cast<std::int32_t>(sum >> shift);
        const std::int32_t finite = drawn > (kInfinity - 1) >> shift ? below : drawn;
        const std::int32_t level = std::max(finite, first.base);
        codes[i] = level;
        low = std::min(low, level | (~has_level & std::numeric_limits<std::int32_t>::max()));
        high = std::max(high, level & has_level);
    }
    // What was rounded may have come to fit a finer window, or another: see [Note: blocks of 256].
    const bool is_empty = high == 0;
    const Window last = is_empty ? Window{kShiftMin, 0} : window_of(low << shift, high << shift);
    const int finer = shift - last.shift;
    for (std::size_t i = 0; i < kBlockNumel; ++i) {
        const std::int32_t magnitude = magnitudes[i];
        const auto level = static_cast<std::int32_t>(static_cast<std::uint32_t>(codes[i]) << finer);
        const std::int32_t special = magnitude == kInfinity ? kWindowInfinity : kWindowNan;
        const std::int32_t finite = magnitude == 0 ? 0 : level - last.base + 1;
        codes[i] = magnitude < kInfinity ? finite : special;
    }
    return static_cast<std::uint32_t>(last.base) << last.shift | static_cast<std::uint32_t>(last.shift);
}

CODEC_INLINE std::uint32_t encode_linear(const Block& magnitudes, const Block& signs, const Block& random,
                                         const Range& range, Block& codes) {
    // Exponents are as fp32 has them, 127 more.
    const std::int32_t largest = std::max(range.high >> kMantissaBits, 1);
    const std::int32_t above = (range.high & 0x7FFFFF) > kUnitsMaxMantissa ? 1 : 0;
    std::int32_t unit = std::max(largest - kUnitsMaxExponent + above, 1);
    const std::int32_t units_max = unit >= kLastExponent ? kLastUnitsMax : kUnitsMax;
    std::int32_t most = 0;
    for (std::size_t i = 0; i < kBlockNumel; ++i) {
        const std::int32_t finite = magnitudes[i] < kInfinity ? magnitudes[i] : 0;
        const std::int32_t exponent = std::max(finite >> kMantissaBits, 1);
        const std::int32_t significand = (finite & 0x7FFFFF) | (finite > 0x7FFFFF ? 0x800000 : 0);
        const std::int32_t down = std::min(unit + kUnitsMaxExponent - exponent, 31);
        const std::int32_t value = (significand << (kFractionBits + 7 - 24)) >> down;
        const std::int32_t drawn = (value + (random[i] << 8) + 0x80) >> kFractionBits;
        codes[i] = std::min(drawn, units_max);
        most = std::max(most, codes[i]);
    }
    // As above: the largest may have become what half the unit can count.
    const int doubled = 2 * most <= kUnitsMax && unit > 1 ? 1 : 0;
    unit -= doubled;
    for (std::size_t i = 0; i < kBlockNumel; ++i) {
        const std::int32_t magnitude = magnitudes[i];
        const std::int32_t special = magnitude == kInfinity ? kLinearInfinity : kLinearNan;
        const std::int32_t code = magnitude < kInfinity ? codes[i] << doubled : special;
        codes[i] = code | signs[i] << 7;
    }
    return kSign | static_cast<std::uint32_t>(unit) << kMantissaBits;
}

CODEC_INLINE void encode_piece(const Byte* __restrict values, Byte* __restrict codes, Byte* __restrict scales,
                               std::size_t numel, std::uint64_t first, const RoundingKey& key,
                               GroupBits& group_bits) {
    Block magnitudes;
    Block signs;
    Block random;
    Block coded;
    for (std::size_t i = 0; i < numel; i += kBlockNumel) {
        const auto& bits = group_bits.of((first + i) / kGroupNumel, key);
        const std::size_t skip = (first + i) % kGroupNumel;
        const std::size_t count = std::min(kBlockNumel, numel - i);
        // What a last block lacks is zeros.
        std::array<Byte, 4 * kBlockNumel> padded;
        const Byte* block = values + 4 * i;
        if (count < kBlockNumel) {
            padded.fill(0);
            std::memcpy(padded.data(), block, 4 * count);
            block = padded.data();
        }
        for (std::size_t j = 0; j < kBlockNumel; ++j) {
            const std::uint32_t value = load32(block, j);
            magnitudes[j] = static_cast<std::int32_t>(value & ~kSign);
            signs[j] = static_cast<std::int32_t>(value >> 31);
            random[j] = static_cast<std::int32_t>(bits[skip + j]);
        }
        const Range range = range_of(magnitudes, signs);
        const std::uint32_t scale = range.is_signed ? encode_linear(magnitudes, signs, random, range, coded)
                                                    : encode_window(magnitudes, random, range, coded);
        store32(scales, i / kBlockNumel, scale);
        if (count == kBlockNumel) {  // a length that the compiler knows
            for (std::size_t j = 0; j < kBlockNumel; ++j) codes[i + j] = static_cast<Byte>(coded[j]);
        } else {
            for (std::size_t j = 0; j < count; ++j) codes[i + j] = static_cast<Byte>(coded[j]);
        }
    }
}

CODEC_INLINE void decode_window(const Byte* __restrict codes, Byte* __restrict values, std::size_t numel,
                                std::uint32_t scale) {
    const std::uint32_t shift = scale & 31;
    const std::uint32_t smallest = scale & ~std::uint32_t{0xFF};
    for (std::size_t i = 0; i < numel; ++i) {
        const std::int32_t code = codes[i];
        const auto level = smallest + (static_cast<std::uint32_t>(code - 1) << shift);
        const auto special = static_cast<std::uint32_t>(code == kWindowInfinity ? kInfinity : kNan);
        store32(values, i, code == 0 ? 0 : code < kWindowInfinity ? level : special);
    }
}

CODEC_INLINE void decode_linear(const Byte* __restrict codes, Byte* __restrict values, std::size_t numel,
                                std::uint32_t scale) {
    const std::uint32_t raised = (scale & ~kSign) - (std::uint32_t{127} << kMantissaBits);
    for (std::size_t i = 0; i < numel; ++i) {
        const std::int32_t code = codes[i] & 0x7F;
        const auto units = static_cast<float>(code);
        std::uint32_t bits = 0;
        std::memcpy(&bits, &units, 4);
        const auto special = static_cast<std::uint32_t>(code == kLinearInfinity ? kInfinity : kNan);
        const std::uint32_t magnitude = code == 0 ? 0 : code < kLinearInfinity ? bits + raised : special;
        store32(values, i, magnitude | static_cast<std::uint32_t>(codes[i] >> 7) << 31);
    }
}

CODEC_INLINE void decode_piece(const Byte* __restrict codes, const Byte* __restrict scales,
                               Byte* __restrict values, std::size_t numel) {
    for (std::size_t i = 0; i < numel; i += kBlockNumel) {
        const std::uint32_t scale = load32(scales, i / kBlockNumel);
        const std::size_t count = std::min(kBlockNumel, numel - i);
        if ((scale & kSign) != 0) {
            if (count == kBlockNumel) {
                decode_linear(codes + i, values + 4 * i, kBlockNumel, scale);
            } else {
                decode_linear(codes + i, values + 4 * i, count, scale);
            }
        } else if (count == kBlockNumel) {
            decode_window(codes + i, values + 4 * i, kBlockNumel, scale);
        } else {
            decode_window(codes + i, values + 4 * i, count, scale);
        }
    }
}

// The loops above, compiled once for each instruction set, as in codec.cpp.
#define INT8_VARIANT(name, ...)                                                                          \
    struct name {                                                                                        \
        __VA_ARGS__ static void encode(const Byte* values, Byte* codes, Byte* scales, std::size_t numel, \
                                       std::uint64_t first, const RoundingKey& key, GroupBits& bits) {   \
            encode_piece(values, codes, scales, numel, first, key, bits);                                \
        }                                                                                                \
        __VA_ARGS__ static void decode(const Byte* codes, const Byte* scales, Byte* values,              \
                                       std::size_t numel) {                                              \
            decode_piece(codes, scales, values, numel);                                                  \
        }                                                                                                \
        static constexpr Int8Kernels kernels() { return {encode, decode}; }                              \
    }

INT8_VARIANT(Baseline, );
#if defined(__x86_64__)
INT8_VARIANT(Avx2, CODEC_AVX2);
INT8_VARIANT(Avx512, CODEC_AVX512);
#endif

}  // namespace

Int8Kernels int8_kernels(InstructionSet set) {
#if defined(__x86_64__)
    if (set == InstructionSet::kAvx512) return Avx512::kernels();
    if (set == InstructionSet::kAvx2) return Avx2::kernels();
#endif
    static_cast<void>(set);
    return Baseline::kernels();
}

void encode_int8(const void* values, void* codes, void* scales, std::size_t numel, std::uint64_t first,
                 const RoundingKey& key, unsigned threads, InstructionSet set) {
    in_pieces(numel, threads, [&, encode = int8_kernels(set).encode](std::size_t offset, std::size_t length) {
        GroupBits bits;
        encode(static_cast<const Byte*>(values) + 4 * offset, static_cast<Byte*>(codes) + offset,
               static_cast<Byte*>(scales) + 4 * (offset / kBlockNumel), length, first + offset, key, bits);
    });
}

void decode_int8(const void* codes, const void* scales, void* values, std::size_t numel, unsigned threads,
                 InstructionSet set) {
    in_pieces(numel, threads, [&, decode = int8_kernels(set).decode](std::size_t offset, std::size_t length) {
        decode(static_cast<const Byte*>(codes) + offset,
               static_cast<const Byte*>(scales) + 4 * (offset / kBlockNumel),
               static_cast<Byte*>(values) + 4 * offset, length);
    });
}

}  // namespace swapper
