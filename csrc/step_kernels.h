// The loops over a tile, compiled for each instruction set. See step_program.h.
#pragma once

#include "codec_tiles.h"
#include "step_program.h"

namespace swapper {

struct StepKernels {
    RunTile run;
    // bf16 to fp32.
    void (*widen)(const codec::Byte* half, float* out, std::size_t numel);
    // See codec_tiles.h.
    std::size_t (*count_ties)(const codec::Byte* low, std::size_t numel);
    std::size_t (*join)(const codec::Byte* param, const codec::Byte* low, const codec::Byte* ties,
                        std::size_t bit, codec::Byte* master, std::size_t numel);
    void (*split)(const codec::Byte* master, codec::Byte* param, codec::Byte* low, std::size_t numel,
                  codec::PieceTies& ties);
};

// Those of an instruction set that this processor has.
const StepKernels& step_kernels(InstructionSet set);

}  // namespace swapper
