// fp32 values stored as bf16, rounded at random but always alike.
//
// [Note: stochastic rounding]
// A value between two neighbours of bf16 becomes the upper or the lower one with the probability that makes
// the mean the value itself: a random number of 16 bits is added to the low half, and the low half cut off.
// Rounded to nearest, an average that changes by less than half a unit a step would never move. The random
// numbers are those of [Note: random bits] in rounding.h.
//
// What bf16 can hold stays as it is: zeros of both signs, infinities, and NaNs as far as their high half
// goes. Denormals are rounded like all others. A finite value never becomes infinite: beyond the largest of
// bf16 it becomes that.

#pragma once

#include <cstddef>
#include <cstdint>

#include "rounding.h"
#include "step_program.h"

namespace swapper {

// Writes `numel` fp32 values at `values` as bf16 to `stored`. See [Note: stochastic rounding].
//
// `first` is the index of the first element. Addresses may have any alignment; the ranges must not overlap.
// Up to `threads` threads share the work; what is written does not depend on their number, on `set`, nor on
// how the elements are cut into calls.
void encode_bf16(const void* values, void* stored, std::size_t numel, std::uint64_t first,
                 const RoundingKey& key, unsigned threads, InstructionSet set = best_instruction_set());

// Writes `numel` bf16 values at `stored` as fp32 to `values`; exact. As above.
void decode_bf16(const void* stored, void* values, std::size_t numel, unsigned threads,
                 InstructionSet set = best_instruction_set());

// Both on this thread, for whoever shares the work by itself. `bits` are of elements of the same key.
struct Bf16Kernels {
    void (*encode)(const codec::Byte* values, codec::Byte* stored, std::size_t numel, std::uint64_t first,
                   const RoundingKey& key, rounding::GroupBits& bits);
    void (*decode)(const codec::Byte* stored, codec::Byte* values, std::size_t numel);
};
Bf16Kernels bf16_kernels(InstructionSet set);

}  // namespace swapper
