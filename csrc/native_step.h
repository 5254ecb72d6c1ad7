// One pass over memory that steps segments of parameters: joins masters, steps, splits them again and sums
// the parameter. See [Note: native steps] in step_program.h and [Note: split masters] in codec.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "rounding.h"
#include "step_program.h"

namespace swapper {

// What is done to each tile of a segment. Register 0 is the parameter, or its master, 1 the gradient, those
// from 2 on the arrays of the job; the rest are of the tile alone.
class StepProgram {
  public:
    // Throws std::invalid_argument if an instruction names a register that is not there, or writes the
    // gradient, or takes a root where has_vendor_sqrt() is false.
    StepProgram(std::vector<Instruction> instructions, std::size_t arrays, std::size_t registers);

    const std::vector<Instruction>& instructions() const { return instructions_; }
    std::size_t arrays() const { return arrays_; }
    std::size_t registers() const { return registers_; }
    bool reads_param() const { return reads_param_; }
    bool writes_param() const { return writes_param_; }
    // True if an instruction names the register, or is fused and reads it. One of several passes does not use
    // all that its job has, and what it does not use is not brought from memory.
    bool uses(std::size_t index) const { return (used_ >> index & 1) != 0; }

  private:
    std::vector<Instruction> instructions_;
    std::size_t arrays_;
    std::size_t registers_;
    std::uint32_t used_ = 0;  // a bit for each register
    bool reads_param_ = false;
    bool writes_param_ = false;
};

// How an array of a job is stored, if it is encoded: see bf16_codec.h and int8_codec.h. It is decoded as the
// pass comes to a tile, and encoded as it leaves it.
struct EncodedArray {
    enum class Encoding : std::uint8_t { kNone, kBf16, kInt8 };

    Encoding encoding = Encoding::kNone;
    bool decodes = false;     // before the program
    bool encodes = false;     // after it
    void* data = nullptr;     // of any alignment, as `scales`
    void* scales = nullptr;   // of int8
    std::uint64_t first = 0;  // index of the first element; of int8 a multiple of 256
    RoundingKey key{};
};

// A segment. All addresses are multiples of their elements' size; arrays are equal or have no byte in common.
struct StepJob {
    std::shared_ptr<const StepProgram> program;
    std::size_t numel = 0;
    // fp32: the parameter, or a master that is kept whole. Null: the master is split.
    float* param = nullptr;
    // Of a split master; see split_master(). `ties` has its `tie_bits` ties, and gets nothing: the new ones
    // go to `new_ties`, ties_bytes_max(numel) bytes.
    void* bits = nullptr;
    void* low = nullptr;
    const void* ties = nullptr;
    std::size_t tie_bits = 0;
    void* new_ties = nullptr;
    const void* gradient = nullptr;
    bool is_half = false;  // the gradient is bf16, else fp32
    // Null where an array is encoded, and no other pass needs its values: they are in the tile alone.
    std::vector<float*> arrays;
    std::vector<EncodedArray> encoded;  // of each array, or empty if none is
};

// Of a job whose split master was written: its new ties, and the CRC-32C of its new `bits`; else zeros.
struct StepResult {
    std::size_t tie_bits = 0;
    std::uint32_t crc = 0;
};

// Steps `jobs` on up to `threads` threads, this one among them. What is written does not depend on their
// number.
//
// Throws std::invalid_argument, and nothing is written, if a job is not as described, or the low halves of
// one do not have as many ties as it says.
std::vector<StepResult> run_step(const std::vector<StepJob>& jobs, unsigned threads, InstructionSet set);

// The same in two parts: see CrewWork.
class StepRun {
  public:
    // Begins. Throws as run_step() does, but for wrong ties.
    StepRun(std::vector<StepJob> jobs, unsigned threads, InstructionSet set);
    ~StepRun();  // Waits.

    // Returns when all is done, and throws for wrong ties.
    std::vector<StepResult> wait();

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace swapper
