// bf16 values that are only read, in 10.5 to 11 bits each, to the bit: exponents in a code of unequal length.
//
// [Note: packed bf16] The sign and the 7 bits of the mantissa of a weight look random and are stored as they
// are. Its exponent has 2.6 bits of information, as weights of a matrix are of similar size. So of each chunk
// of 4096 values the three most frequent exponents have a code of 2 bits, the next seven one of 2 + 3, and
// all others one of 2 + 3 + 8:
//
//     head     magic, numel, length of all of it in bytes (8 bytes each), numel of a chunk, version (4 each)
//     table    of each chunk 16 bytes: its 3 usual and 7 rarer exponents; how many of its exponents are not
//     usual,
//              and how many neither of both (2 bytes each); 1 if its values are as they are; 0
//     data     of each chunk:  sign and mantissa of each value        1 byte each
//                              the 2 bits of the code, each by itself: the bit of all values, 32 in 4 bytes
//                              the 3 bits of those whose code is 3, in the same way
//                              the exponents of those whose 3 bits are 7
//     zeros    up to a multiple of 64
//
// A chunk that would not shrink has its values as they are, so that nothing grows by more than head, table
// and zeros. Bits that belong to no value are 0.
//
// Codes lie bit by bit so that 32 are found at once, and what is rare is put between them by a table of
// shuffles. Where a chunk begins is the sum of what is before it in the table, so each can be unpacked by
// itself.
#pragma once

#include <cstddef>

#include "step_program.h"

namespace swapper {

// Values of a chunk, and the bytes of the head and of an entry of the table.
constexpr std::size_t kBf16ChunkNumel = 4096;
constexpr std::size_t kBf16HeadBytes = 32;
constexpr std::size_t kBf16EntryBytes = 16;

// The most bytes that `numel` values can take; pack_bf16() uses all of them while it works.
//
// Throws std::length_error where no memory could have so many values.
std::size_t packed_bf16_bytes_most(std::size_t numel);

// Packs `numel` values to `packed`, which has packed_bf16_bytes_most() bytes, and does not overlap them. Up
// to `threads` threads share the work; what is written does not depend on their number.
//
// Returns how many bytes it takes, a multiple of 64.
std::size_t pack_bf16(const void* values, std::size_t numel, void* packed, unsigned threads);

// The inverse of pack_bf16(), of `length_bytes` bytes.
//
// The values may be written over what is packed if that ends where they end, or behind: it goes from the
// first to the last, and what is packed is never longer than what it becomes.
//
// Throws std::invalid_argument, with nothing written, where it is not what pack_bf16() has made of so many
// values, or where values would be written over what is still to be read.
void unpack_bf16(const void* packed, std::size_t length_bytes, void* values, std::size_t numel,
                 unsigned threads, InstructionSet set = best_instruction_set());

}  // namespace swapper
