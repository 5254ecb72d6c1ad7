// The codec: every array ends where its memory ends, so that one element too far is found.
#include "codec.h"

#include <cstring>
#include <stdexcept>
#include <vector>

#include "check.h"

using swapper::InstructionSet;
using swapper::join_master;
using swapper::split_master;
using swapper::ties_bytes_max;

namespace {

enum class Values { kRandom, kTies, kSpecial };

uint32_t value_of(Values values, std::mt19937_64& random) {
    constexpr uint32_t kSpecial[] = {0,          0x80000000, 0x3FFF9000, 0x7F7FFFFF, 0xFF7F8000,
                                     0x00000001, 0x7F800000, 0xFF800000, 0x00008000, 0x3F808000};
    switch (values) {
        case Values::kRandom:
            break;
        case Values::kTies:
            return (static_cast<uint32_t>(random()) & 0x7F7F0000) | 0x8000;
        case Values::kSpecial:
            return kSpecial[random() % std::size(kSpecial)];
    }
    const auto value = static_cast<uint32_t>(random());
    return (value & 0x7F800000) == 0x7F800000 ? value & 0xFF800000 : value;  // no NaN: those are not kept
}

void split_and_joined(size_t numel, size_t misalignment, unsigned threads, Values values,
                      InstructionSet set) {
    std::mt19937_64 random(numel * 31 + misalignment);
    const Array master(4 * numel, misalignment);
    const Array param(2 * numel, misalignment);
    const Array low(2 * numel, misalignment);
    const Array ties(ties_bytes_max(numel), misalignment);
    for (size_t i = 0; i < numel; ++i) {
        const uint32_t value = value_of(values, random);
        std::memcpy(master.data() + 4 * i, &value, 4);
    }
    const size_t bits =
        split_master(master.data(), param.data(), low.data(), ties.data(), numel, threads, set);
    CHECK(bits <= numel && (values != Values::kTies || bits == numel));

    const Array exact_ties((bits + 7) / 8);
    std::memcpy(exact_ties.data(), ties.data(), (bits + 7) / 8);
    const Array joined(4 * numel, misalignment);
    join_master(param.data(), low.data(), exact_ties.data(), bits, joined.data(), numel, threads, set);
    CHECK(std::memcmp(master.data(), joined.data(), 4 * numel) == 0);
    for (const size_t wrong : {bits + 1, bits - 1}) {
        if (wrong > numel) continue;  // also where there are none to take one from
        CHECK_THROWS(std::invalid_argument, join_master(param.data(), low.data(), exact_ties.data(), wrong,
                                                        joined.data(), numel, threads, set));
    }
}

}  // namespace

int main() {
    for (const auto set : {InstructionSet::kAvx512, InstructionSet::kAvx2, InstructionSet::kBaseline}) {
        if (!has_instruction_set(set)) continue;
        for (const auto values : {Values::kRandom, Values::kTies, Values::kSpecial}) {
            for (const size_t misalignment : {0, 1, 2}) {
                for (size_t numel = 0; numel < 70; ++numel) {
                    split_and_joined(numel, misalignment, 1, values, set);
                }
                for (const size_t numel : {1023, 4096, 65535, 65537}) {
                    split_and_joined(numel, misalignment, 2, values, set);
                }
            }
        }
    }
    for (const auto values : {Values::kRandom, Values::kTies, Values::kSpecial}) {
        for (const unsigned threads : {1, 2, 5}) {
            split_and_joined((3 << 19) + 77, 0, threads, values, swapper::best_instruction_set());
        }
    }
    std::puts("codec: passed");
    return 0;
}
