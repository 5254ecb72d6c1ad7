#include "bf16_codec.h"

#include <algorithm>
#include <array>

#include "codec_tiles.h"

namespace swapper {
namespace {

using codec::Byte;
using codec::load16;
using codec::load32;
using codec::store16;
using codec::store32;
using rounding::GroupBits;
using rounding::in_pieces;
using rounding::kGroupNumel;

CODEC_INLINE std::uint32_t rounded(std::uint32_t value, std::uint32_t bits) {
    const std::uint32_t high = value >> 16;
    const std::uint32_t magnitude = value & 0x7FFFFFFF;
    const std::uint32_t sum = (value + bits) >> 16;
    // Never from a finite value to infinity, nor to the other sign.
    const std::uint32_t finite = (sum & 0x7FFF) == 0x7F80 ? high : sum;
    // A NaN whose payload is in its low half alone stays one.
    const std::uint32_t nan = high | ((high & 0x7F) == 0 ? 0x40U : 0U);
    return magnitude < 0x7F800000 ? finite : magnitude == 0x7F800000 ? high : nan;
}

CODEC_INLINE void encode_piece(const Byte* __restrict values, Byte* __restrict stored, std::size_t numel,
                               std::uint64_t first, const RoundingKey& key, GroupBits& group_bits) {
    std::size_t i = 0;
    while (i < numel) {
        const std::size_t skip = (first + i) % kGroupNumel;
        const std::size_t count = std::min(kGroupNumel - skip, numel - i);
        const auto& bits = group_bits.of((first + i) / kGroupNumel, key);
        if (count == kGroupNumel) {  // a length that the compiler knows
            for (std::size_t j = 0; j < kGroupNumel; ++j) {
                store16(stored, i + j, rounded(load32(values, i + j), bits[j]));
            }
        } else {
            for (std::size_t j = 0; j < count; ++j) {
                store16(stored, i + j, rounded(load32(values, i + j), bits[skip + j]));
            }
        }
        i += count;
    }
}

CODEC_INLINE void decode_piece(const Byte* __restrict stored, Byte* __restrict values, std::size_t numel) {
    for (std::size_t i = 0; i < numel; ++i) {
        store32(values, i, static_cast<std::uint32_t>(load16(stored, i)) << 16);
    }
}

// The loops above, compiled once for each instruction set, as in codec.cpp.
#define BF16_VARIANT(name, ...)                                                                        \
    struct name {                                                                                      \
        __VA_ARGS__ static void encode(const Byte* values, Byte* stored, std::size_t numel,            \
                                       std::uint64_t first, const RoundingKey& key, GroupBits& bits) { \
            encode_piece(values, stored, numel, first, key, bits);                                     \
        }                                                                                              \
        __VA_ARGS__ static void decode(const Byte* stored, Byte* values, std::size_t numel) {          \
            decode_piece(stored, values, numel);                                                       \
        }                                                                                              \
        static constexpr Bf16Kernels kernels() { return {encode, decode}; }                            \
    }

BF16_VARIANT(Baseline, );
#if defined(__x86_64__)
BF16_VARIANT(Avx2, CODEC_AVX2);
BF16_VARIANT(Avx512, CODEC_AVX512);
#endif

}  // namespace

Bf16Kernels bf16_kernels(InstructionSet set) {
#if defined(__x86_64__)
    if (set == InstructionSet::kAvx512) return Avx512::kernels();
    if (set == InstructionSet::kAvx2) return Avx2::kernels();
#endif
    static_cast<void>(set);
    return Baseline::kernels();
}

void encode_bf16(const void* values, void* stored, std::size_t numel, std::uint64_t first,
                 const RoundingKey& key, unsigned threads, InstructionSet set) {
    in_pieces(numel, threads, [&, encode = bf16_kernels(set).encode](std::size_t offset, std::size_t length) {
        GroupBits bits;
        encode(static_cast<const Byte*>(values) + 4 * offset, static_cast<Byte*>(stored) + 2 * offset, length,
               first + offset, key, bits);
    });
}

void decode_bf16(const void* stored, void* values, std::size_t numel, unsigned threads, InstructionSet set) {
    in_pieces(numel, threads, [&, decode = bf16_kernels(set).decode](std::size_t offset, std::size_t length) {
        decode(static_cast<const Byte*>(stored) + 2 * offset, static_cast<Byte*>(values) + 4 * offset,
               length);
    });
}

}  // namespace swapper
