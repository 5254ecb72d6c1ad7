#include "bf16_codec.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>

#include "codec_tiles.h"
#include "crew.h"

namespace swapper {
namespace {

using codec::Byte;
using codec::load16;
using codec::load32;
using codec::store16;
using codec::store32;

// Elements whose random bits are made together, and calls of Philox that make them: so many that the compiler
// makes vectors of a loop over them, and does not unroll it.
constexpr std::size_t kGroupNumel = 512;
constexpr std::size_t kCalls = 64;

// Threads take pieces of so many elements. Waking one takes about as long as two.
constexpr std::size_t kPieceNumel = std::size_t{1} << 15;

constexpr unsigned kRounds = 10;

using Words = std::array<std::uint32_t, kCalls>;

// The random bits of group `group`, 16 for each element.
CODEC_INLINE void random_bits(std::uint64_t group, const RoundingKey& key,
                              std::array<std::uint32_t, kGroupNumel>& bits) {
    Words c0;
    Words c1;
    Words c2;
    Words c3;
    for (std::size_t i = 0; i < kCalls; ++i) {
        const std::uint64_t call = group * kCalls + i;
        c0[i] = static_cast<std::uint32_t>(call);
        c1[i] = static_cast<std::uint32_t>(call >> 32);
        c2[i] = key.step;
        c3[i] = key.parameter;
    }
    std::uint32_t k0 = key.seed;
    std::uint32_t k1 = key.name;
    for (unsigned round = 0; round < kRounds; ++round) {
        for (std::size_t i = 0; i < kCalls; ++i) {
            const std::uint64_t a = std::uint64_t{0xD2511F53} * c0[i];
            const std::uint64_t b = std::uint64_t{0xCD9E8D57} * c2[i];
            c0[i] = static_cast<std::uint32_t>(b >> 32) ^ c1[i] ^ k0;
            c2[i] = static_cast<std::uint32_t>(a >> 32) ^ c3[i] ^ k1;
            c1[i] = static_cast<std::uint32_t>(b);
            c3[i] = static_cast<std::uint32_t>(a);
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    for (std::size_t i = 0; i < kCalls; ++i) {
        bits[i] = c0[i] & 0xFFFF;
        bits[kCalls + i] = c0[i] >> 16;
        bits[2 * kCalls + i] = c1[i] & 0xFFFF;
        bits[3 * kCalls + i] = c1[i] >> 16;
        bits[4 * kCalls + i] = c2[i] & 0xFFFF;
        bits[5 * kCalls + i] = c2[i] >> 16;
        bits[6 * kCalls + i] = c3[i] & 0xFFFF;
        bits[7 * kCalls + i] = c3[i] >> 16;
    }
}

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
                               std::uint64_t first, const RoundingKey& key) {
    std::array<std::uint32_t, kGroupNumel> bits;
    std::size_t i = 0;
    while (i < numel) {
        const std::size_t skip = (first + i) % kGroupNumel;
        const std::size_t count = std::min(kGroupNumel - skip, numel - i);
        random_bits((first + i) / kGroupNumel, key, bits);
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

// The loops above, compiled once for each instruction set and chosen when first used, as in codec.cpp.
struct Kernels {
    decltype(&encode_piece) encode;
    decltype(&decode_piece) decode;
};

#define BF16_VARIANT(name, ...)                                                               \
    struct name {                                                                             \
        __VA_ARGS__ static void encode(const Byte* values, Byte* stored, std::size_t numel,   \
                                       std::uint64_t first, const RoundingKey& key) {         \
            encode_piece(values, stored, numel, first, key);                                  \
        }                                                                                     \
        __VA_ARGS__ static void decode(const Byte* stored, Byte* values, std::size_t numel) { \
            decode_piece(stored, values, numel);                                              \
        }                                                                                     \
        static constexpr Kernels kernels() { return {encode, decode}; }                       \
    }

BF16_VARIANT(Baseline, );
#if defined(__x86_64__)
BF16_VARIANT(Avx2, __attribute__((target("avx2"))));
#endif

Kernels choose_kernels() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return Avx2::kernels();
#endif
    return Baseline::kernels();
}

const Kernels& kernels() {
    static const Kernels chosen = choose_kernels();
    return chosen;
}

void in_pieces(std::size_t numel, unsigned threads,
               const std::function<void(std::size_t, std::size_t)>& work) {
    const std::size_t pieces = (numel + kPieceNumel - 1) / kPieceNumel;
    std::atomic<std::size_t> next{0};
    run_on_crew(std::min<std::size_t>(threads, std::max<std::size_t>(pieces / 2, 1)), [&] {
        for (std::size_t piece = next++; piece < pieces; piece = next++) {
            const std::size_t offset = piece * kPieceNumel;
            work(offset, std::min(kPieceNumel, numel - offset));
        }
    });
}

}  // namespace

void encode_bf16(const void* values, void* stored, std::size_t numel, std::uint64_t first,
                 const RoundingKey& key, unsigned threads) {
    in_pieces(numel, threads, [&, encode = kernels().encode](std::size_t offset, std::size_t length) {
        encode(static_cast<const Byte*>(values) + 4 * offset, static_cast<Byte*>(stored) + 2 * offset, length,
               first + offset, key);
    });
}

void decode_bf16(const void* stored, void* values, std::size_t numel, unsigned threads) {
    in_pieces(numel, threads, [&, decode = kernels().decode](std::size_t offset, std::size_t length) {
        decode(static_cast<const Byte*>(stored) + 2 * offset, static_cast<Byte*>(values) + 4 * offset,
               length);
    });
}

}  // namespace swapper
