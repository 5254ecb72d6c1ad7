// fp32 values stored in a byte each and a word for each block of 256, rounded at random but always alike.
//
// [Note: blocks of 256]
// Each block is stored in one of two forms, whichever its values allow, and its word says which:
//
// - Window, of a block without a negative value or a negative zero. fp32 values that are not negative are
//   ordered as the integers of their bits, so the bits without their last `shift` bits are a scale that is
//   logarithmic from octave to octave. The word is the bits of the smallest level, with `shift` in its lowest
//   byte, where a level has none. Codes:
//
//       0 zero    1 to 253 level `smallest + ((code - 1) << shift)`    254 infinity    255 NaN
//
//   `shift` is the smallest, from 8 to 20, for which the window holds all finite values but zero. With 20 it
//   spans 31 octaves with 8 levels each, and what is smaller becomes the smallest level; with each less it
//   has twice the levels in half the octaves. A positive value never becomes zero: what takes the root of
//   an average of squares divides by it.
//
// - Linear, of all others. The word is minus the unit, a power of two. Codes have the sign in the highest
//   bit, and below it:
//
//       0 to 125 so many units    126 infinity    127 NaN
//
//   The unit is the smallest, from 2**-126, of which the largest finite magnitude has at most 125.
//
// A value between two levels becomes the upper or the lower one, with the probability that makes the mean the
// value itself, to 2**-17 of their distance. The random numbers are those of [Note: random bits] in
// rounding.h. A finite value never becomes infinite: beyond the largest finite level it becomes that.
//
// The levels of one window or unit are among those of each finer one, and the form is decided anew by what
// the values were rounded to. So it is a function of the stored values, and what was decoded is encoded to
// the same bytes whatever the random bits are. A value that did not change stays, too, where the largest or
// smallest of its block does, unless levels must become coarser.
//
// All of it is arithmetic on integers: bits do not depend on instruction sets, nor on how denormals are
// treated.

#pragma once

#include <cstddef>
#include <cstdint>

#include "rounding.h"
#include "step_program.h"

namespace swapper {

// Elements of a block.
constexpr std::size_t kBlockNumel = 256;

constexpr std::size_t blocks_of(std::size_t numel) {
    return numel / kBlockNumel + (numel % kBlockNumel != 0 ? 1 : 0);
}

// Writes `numel` fp32 values at `values` to `codes`, a byte each, and to `scales`, 4 bytes a block.
//
// `first` is the index of the first element, a multiple of 256: blocks begin at multiples. Only the last
// may be shorter. Addresses may have any alignment; the ranges must not overlap. Up to `threads` threads
// share the work; what is written does not depend on their number, on `set`, nor on how the blocks are cut
// into calls.
void encode_int8(const void* values, void* codes, void* scales, std::size_t numel, std::uint64_t first,
                 const RoundingKey& key, unsigned threads, InstructionSet set = best_instruction_set());

// Writes the fp32 values of `numel` elements at `codes` and `scales` to `values`, from the first of a block
// on; exact. As above. Whatever the bytes are, some value comes of them.
void decode_int8(const void* codes, const void* scales, void* values, std::size_t numel, unsigned threads,
                 InstructionSet set = best_instruction_set());

// Both on this thread, for whoever shares the work by itself. `bits` are of elements of the same key.
struct Int8Kernels {
    void (*encode)(const codec::Byte* values, codec::Byte* codes, codec::Byte* scales, std::size_t numel,
                   std::uint64_t first, const RoundingKey& key, rounding::GroupBits& bits);
    void (*decode)(const codec::Byte* codes, const codec::Byte* scales, codec::Byte* values,
                   std::size_t numel);
};
Int8Kernels int8_kernels(InstructionSet set);

}  // namespace swapper
