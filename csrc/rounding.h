// The random bits that state is rounded with, and how threads share a run of elements: what the codecs of
// state share.
//
// [Note: random bits]
// They are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a
// function of a counter: they depend on nothing but who asks for what. One call gives 16 bits to each of
// eight elements:
//
//     key      seed, and a number of the state's name
//     counter  number of the call (64 bits), step, number of the parameter
//
// Of 512 elements from a multiple of 512 on, which have 64 calls, element i has of call i % 64 the half
// i / 64, low halves first: so vectors of calls give vectors of elements.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "codec_tiles.h"
#include "crew.h"

namespace swapper {

// Of which the random bits are a function, beside the element's index.
struct RoundingKey {
    std::uint32_t seed;
    std::uint32_t name;
    std::uint32_t step;
    std::uint32_t parameter;
};

namespace rounding {

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

// The random bits of one group at a time, so that neighbours in it have them made once.
class GroupBits {
  public:
    CODEC_INLINE const std::array<std::uint32_t, kGroupNumel>& of(std::uint64_t group,
                                                                  const RoundingKey& key) {
        if (group != group_) random_bits(group, key, bits_);
        group_ = group;
        return bits_;
    }

  private:
    std::array<std::uint32_t, kGroupNumel> bits_;
    std::uint64_t group_ = ~std::uint64_t{0};
};

// Calls `work` with the offset and length of each piece of `numel` elements, on up to `threads` threads.
inline void in_pieces(std::size_t numel, unsigned threads,
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

}  // namespace rounding
}  // namespace swapper
