// A step of an optimizer, as a list of operations on registers of 256 elements, run tile by tile.
//
// [Note: native steps]
// An optimizer's `step` in Python is recorded on a few elements, as the operations of torch that it calls
// with their scalars, and replayed here on all of them: the same operations in the same order, with the same
// roundings, but on a tile that stays in the L1 cache from the first operation to the last. What torch rounds
// once, because its kernels use fused multiply-adds, is written as std::fma here, and nothing else is
// contracted (-ffp-contract=off). Equal means: equal bits, or both NaN. Who uses it compares both on real
// elements before anything is written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace swapper {

// Elements of a tile.
constexpr std::size_t kTileNumel = 256;
constexpr std::size_t kRegistersMax = 24;

// On registers a, b, c and numbers x, y, as torch computes it on the CPU in fp32, where numbers are rounded
// to fp32 first. Those that are named fused are whole steps of torch's: they read and write registers 0
// (parameter), 1 (gradient, only read) and a, b, c (state).
enum class Opcode : std::uint8_t {
    kCopy,          // a
    kNeg,           // -a
    kAbs,           // |a|
    kSign,          // -1, 0 or 1
    kReciprocal,    // 1 / a
    kAdd,           // fma(b, x, a)
    kAddNumber,     // a + x
    kMul,           // a * b
    kMulNumber,     // a * x
    kDiv,           // a / b
    kDivNumber,     // a / x
    kLerp,          // from a to b by x, from the nearer end
    kAddcmul,       // fma(x * b, c, a)
    kAddcdiv,       // a + x * b / c
    kFusedAdam,     // constants: see namespace adam
    kFusedSgd,      // constants: see namespace sgd
    kMaximum,       // the larger of a and b, or a NaN of theirs
    kFusedAdagrad,  // constants: see namespace adagrad
    kRsqrt,         // 1 / the nearest float to the root of a
    kFill,          // x
    kClampMin,      // a, or x if that is larger
    kClampMax,      // a, or x if that is smaller
    kVendorSqrt,    // the root of a as torch has it: see vendor_sqrt.h
};
constexpr std::size_t kOpcodes = 23;

struct Instruction {
    Opcode code = Opcode::kCopy;
    std::uint8_t out = 0;
    std::uint8_t a = 0;
    std::uint8_t b = 0;
    std::uint8_t c = 0;
    // Of fused steps: which product of the sum of two is not rounded, in vectors (bit 0) and in the last
    // `numel % 8` elements (bit 1): the first if the bit is set, else the second.
    std::uint8_t contraction = 0;
    std::array<double, 10> constants{};
};

// Indices of `Instruction::constants`. Numbers of operations that are not fused are the first.
namespace adam {
// Factor: of the parameter, 1 - lr * weight_decay, if the decay is 2 (decoupled), and weight_decay if it
// is 1. Step size: -lr / bias correction 1. Sign: -1 to maximize. Amsgrad: 1 if c has the largest squares.
constexpr std::size_t kStepSize = 0, kBias2Sqrt = 1, kWeight = 2, kBeta2 = 3, kSquareWeight = 4, kEps = 5,
                      kSign = 6, kFactor = 7, kDecay = 8, kAmsgrad = 9;
}  // namespace adam
namespace sgd {
constexpr std::size_t kMinusLr = 0, kMomentum = 1, kWeightDecay = 2, kUndamped = 3, kSign = 4, kNesterov = 5;
}  // namespace sgd
namespace adagrad {
// Rate: lr / (1 + (step - 1) * lr_decay).
constexpr std::size_t kRate = 0, kWeightDecay = 1, kEps = 2, kSign = 3;
}  // namespace adagrad

// Runs `count` instructions on `numel` <= kTileNumel elements, at `registers`: each a place of its own, or
// equal to another. The last `numel % 8` elements are the last of what torch is called with, or there are
// none.
using RunTile = void (*)(const Instruction* instructions, std::size_t count, float* const* registers,
                         std::size_t numel);

// Instruction sets that `run_tile` is compiled for, the fastest first.
enum class InstructionSet : std::uint8_t { kAvx512, kAvx2, kBaseline };

// True if this processor has it.
bool has_instruction_set(InstructionSet set);
// The fastest that this processor has.
InstructionSet best_instruction_set();

}  // namespace swapper
