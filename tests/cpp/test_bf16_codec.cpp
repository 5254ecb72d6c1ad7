// The codec of state in bf16: instruction sets, threads and cuts give the same bytes, and what bf16 has
// stays.
#include "bf16_codec.h"

#include <cstring>
#include <vector>

#include "check.h"

using swapper::decode_bf16;
using swapper::encode_bf16;
using swapper::InstructionSet;
using swapper::RoundingKey;

namespace {

const std::vector<InstructionSet> kSets = {InstructionSet::kAvx512, InstructionSet::kAvx2,
                                           InstructionSet::kBaseline};

const RoundingKey kKey{1, 2, 3, 4};

void check_values(size_t numel, size_t misalignment, unsigned threads) {
    std::mt19937_64 random(numel * 31 + misalignment);
    const Array original(4 * numel, misalignment);
    for (size_t i = 0; i < numel; ++i) {
        auto value = static_cast<uint32_t>(random());
        if (i % 4 == 0) value |= 0x7F800000;                            // NaNs
        if (i % 4 == 1) value = (value & 0x80000000) | (random() & 3);  // denormals and zeros
        if (i % 16 == 2) value = (value & 0x80000000) | 0x7F800000;
        if (i % 16 == 3) value |= 0x7F7FFF00;  // near the largest finite values, and NaNs
        std::memcpy(original.data() + 4 * i, &value, 4);
    }
    const uint64_t first = random() % 1000;
    const Array coded(2 * numel);
    encode_bf16(original.data(), coded.data(), numel, first, kKey, 1, InstructionSet::kBaseline);
    const Array decoded(4 * numel);
    decode_bf16(coded.data(), decoded.data(), numel, 1, InstructionSet::kBaseline);
    for (const InstructionSet set : kSets) {
        if (!has_instruction_set(set)) continue;
        const Array same(2 * numel, misalignment);
        encode_bf16(original.data(), same.data(), numel, first, kKey, threads, set);
        CHECK(same == coded);
        const Array again(4 * numel, misalignment);
        decode_bf16(coded.data(), again.data(), numel, threads, set);
        CHECK(again == decoded);
        encode_bf16(decoded.data(), same.data(), numel, first + 1, kKey, threads, set);
        CHECK(same == coded);
        const size_t cut = numel / 3;
        const Array parts(2 * numel, misalignment);
        encode_bf16(original.data(), parts.data(), cut, first, kKey, threads, set);
        encode_bf16(original.data() + 4 * cut, parts.data() + 2 * cut, numel - cut, first + cut, kKey,
                    threads, set);
        CHECK(parts == coded);
    }
}

}  // namespace

int main() {
    for (const size_t misalignment : {0, 1, 2}) {
        for (const size_t numel : {0, 1, 2, 31, 255, 511, 512, 513, 1000, 65537}) {
            check_values(numel, misalignment, 2);
        }
    }
    for (const unsigned threads : {1, 2, 4}) check_values((1 << 18) + 77, 0, threads);
    std::puts("bf16_codec: passed");
    return 0;
}
