// How an fp32 master copy of bf16 parameters is stored without storing the parameters twice.
//
// [Note: split masters]
// A bf16 parameter is its master rounded to nearest even, so it already says nearly all of the master's
// high half. What is stored beside it is the low half and, seldom, one bit. (Keeping only the half that
// the parameter lacks: Megatron-LM's `store_param_remainders`; there the parameter is the truncated
// master, here it is the rounded one, equal to `master.to(torch.bfloat16)`.)
//
//     master      h (16 bits) | lo (16 bits)
//     param  b    h rounded by lo: h, or h + 1
//     low         lo
//     ties        for each element with lo == 0x8000, in the order of the elements, one bit:
//                 1 if b is h + 1, 0 if b is h; bit k is bit k % 8, from the lowest, of byte k / 8
//
// and back: h is b where lo < 0x8000, b - 1 where lo > 0x8000, and b minus the bit where lo == 0x8000.
// There b is even either way, so the bit is the lowest of h, which nothing else says. Random masters have
// 15 ties in a million; masters made from fp16 weights one in eight; the worst case is all of them.
//
// Rounding up carries into the exponent as it should: 0x3FFF9000 has b = 0x4000, and the largest floats
// have b = 0x7F80, infinity, from which h = 0x7F7F comes back. Zeros keep their sign and denormals are
// not flushed. A NaN is not kept bit for bit: each becomes b = 0x7FC0 with lo = 0, that is 0x7FC00000.

#pragma once

#include <cstddef>
#include <cstdint>

#include "step_program.h"

namespace swapper {

// Bytes that hold the tie bits of `numel` elements in the worst case.
constexpr std::size_t ties_bytes_max(std::size_t numel) {
    return numel / 8 + (numel % 8 != 0 ? 1 : 0);
}

// Splits `numel` fp32 values at `master` into bf16 at `param`, 16-bit halves at `low` and bits at `ties`.
// See [Note: split masters].
//
// Addresses may have any alignment; the four ranges must not overlap. `ties` has ties_bytes_max(numel)
// bytes; of them the first ceil(result / 8) are written (the last one's unused bits are 0) and the others
// left alone. Up to `threads` threads share the work where it is long enough to pay; what is written does
// not depend on their number, nor on `set`.
//
// Returns the number of tie bits.
std::size_t split_master(const void* master, void* param, void* low, void* ties, std::size_t numel,
                         unsigned threads, InstructionSet set = best_instruction_set());

// The inverse of split_master(): `master` gets the bits that were split, NaNs as the canonical one.
//
// Reads the first ceil(tie_bits / 8) bytes of `ties`. The ranges must not overlap.
//
// Throws std::invalid_argument, with `master` undefined, unless `low` has exactly `tie_bits` ties.
void join_master(const void* param, const void* low, const void* ties, std::size_t tie_bits, void* master,
                 std::size_t numel, unsigned threads, InstructionSet set = best_instruction_set());

}  // namespace swapper
