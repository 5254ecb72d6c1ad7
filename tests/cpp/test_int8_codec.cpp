// The codec of state in int8: instruction sets and threads give the same bytes, what was decoded is encoded
// to the same bytes, means are right, and special values stay. Every array ends where its memory ends.
#include "int8_codec.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"

using swapper::blocks_of;
using swapper::decode_int8;
using swapper::encode_int8;
using swapper::InstructionSet;
using swapper::kBlockNumel;
using swapper::RoundingKey;

namespace {

constexpr uint32_t kInfinity = 0x7F800000;

// Blocks whose draws have one mean: 10^7 elements. Where threads are watched, which is ten times as slow,
// fewer.
#if defined(__SANITIZE_THREAD__)
constexpr size_t kBlocks = 1'000;
#else
constexpr size_t kBlocks = 40'000;
#endif

struct Coded {
    Array codes;
    Array scales;

    explicit Coded(size_t numel, size_t misalignment = 0)
        : codes(numel, misalignment), scales(4 * blocks_of(numel), misalignment) {}
    bool operator==(const Coded& other) const { return codes == other.codes && scales == other.scales; }
};

const std::vector<InstructionSet> kSets = {InstructionSet::kAvx512, InstructionSet::kAvx2,
                                           InstructionSet::kBaseline};

enum class Values {
    kBits,      // any bits at all
    kPositive,  // any, without signs
    kNormal,    // of usual sizes
    kSquares,   // the same, squared and averaged a little
    kAlike,     // that differ in their last bits
    kSpecial,   // zeros, infinities, NaNs and the ends of ranges
    kDenormal,  // below the smallest normal number, and a little above
    kLarge,     // close to the largest number
    kFew,       // zeros, but for a few
    kEnd,
};

uint32_t value_of(Values values, std::mt19937_64& random) {
    constexpr uint32_t kSpecial[] = {0,          0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x80000001,
                                     0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x007FFFFF, 0x3F800000};
    const auto bits = static_cast<uint32_t>(random());
    const float normal = std::normal_distribution<float>()(random);
    float value = normal;
    switch (values) {
        case Values::kBits:
            return bits;
        case Values::kPositive:
            return bits & 0x7FFFFFFF;
        case Values::kNormal:
            break;
        case Values::kSquares:
            value = normal * normal + 0.01F;
            break;
        case Values::kAlike:
            return 0x3F812345 + (bits & 0xFFF);
        case Values::kSpecial:
            return kSpecial[bits % std::size(kSpecial)];
        case Values::kDenormal:
            return bits & 0x80FFFFFF;
        case Values::kLarge:
            return (0x7F7FFFFF - (bits & 0xFFFFFF)) | (bits & 0x80000000);
        case Values::kFew:
            return bits % 100 != 0 ? 0 : static_cast<uint32_t>(random());
        case Values::kEnd:
            break;
    }
    uint32_t result = 0;
    std::memcpy(&result, &value, 4);
    return result;
}

float float_of(const Array& values, size_t i) {
    float value = 0;
    std::memcpy(&value, values.data() + 4 * i, 4);
    return value;
}

uint32_t bits_of(const Array& values, size_t i) {
    uint32_t value = 0;
    std::memcpy(&value, values.data() + 4 * i, 4);
    return value;
}

Coded encoded(const Array& values, size_t numel, uint64_t first, const RoundingKey& key, unsigned threads = 1,
              InstructionSet set = InstructionSet::kBaseline, size_t misalignment = 0) {
    Coded coded(numel, misalignment);
    encode_int8(values.data(), coded.codes.data(), coded.scales.data(), numel, first, key, threads, set);
    return coded;
}

void check_values(Values values, size_t numel, size_t misalignment, unsigned threads) {
    std::mt19937_64 random(numel * 31 + misalignment + static_cast<size_t>(values) * 7);
    const Array original(4 * numel, misalignment);
    for (size_t i = 0; i < numel; ++i) {
        const uint32_t value = value_of(values, random);
        std::memcpy(original.data() + 4 * i, &value, 4);
    }
    const uint64_t first = kBlockNumel * (random() % 5);
    const RoundingKey key{1, 2, 3, 4};
    const Coded coded = encoded(original, numel, first, key);
    const Array decoded(4 * numel, misalignment);
    decode_int8(coded.codes.data(), coded.scales.data(), decoded.data(), numel, 1, InstructionSet::kBaseline);
    for (size_t i = 0; i < numel; ++i) {
        const uint32_t was = bits_of(original, i) & 0x7FFFFFFF;
        const uint32_t is = bits_of(decoded, i) & 0x7FFFFFFF;
        CHECK((was > kInfinity) == (is > kInfinity));
        CHECK((was == kInfinity) == (is == kInfinity));
        CHECK(was > kInfinity || (bits_of(original, i) ^ bits_of(decoded, i)) >> 31 == 0);
        CHECK(was != 0 || is == 0);
    }
    for (const InstructionSet set : kSets) {
        if (!has_instruction_set(set)) continue;
        CHECK(encoded(original, numel, first, key, threads, set, misalignment) == coded);
        const Array again(4 * numel, misalignment);
        decode_int8(coded.codes.data(), coded.scales.data(), again.data(), numel, threads, set);
        CHECK(again == decoded);
    }
    for (uint32_t step = 5; step < 8; ++step) {
        CHECK(encoded(decoded, numel, first + kBlockNumel * step, {1, 2, step, 4}, threads,
                      swapper::best_instruction_set()) == coded);
    }
}

// The mean of what `value` becomes among `others`, in units of the standard error of `blocks` blocks of
// draws.
void check_mean(float value, const std::vector<float>& others) {
    constexpr size_t kNumel = kBlockNumel * kBlocks;
    const Array values(4 * kNumel);
    for (size_t i = 0; i < kNumel; ++i) {
        const size_t place = i % kBlockNumel;
        const float here = place < others.size() ? others[place] : value;
        std::memcpy(values.data() + 4 * i, &here, 4);
    }
    const Coded coded = encoded(values, kNumel, 0, {9, 8, 7, 6}, 2, swapper::best_instruction_set());
    const Array decoded(4 * kNumel);
    decode_int8(coded.codes.data(), coded.scales.data(), decoded.data(), kNumel, 2);
    double sum = 0;
    double squares = 0;
    size_t draws = 0;
    for (size_t i = 0; i < kNumel; ++i) {
        if (i % kBlockNumel < others.size()) continue;
        const double error = static_cast<double>(float_of(decoded, i)) - static_cast<double>(value);
        sum += error;
        squares += error * error;
        ++draws;
    }
    CHECK(draws > 253 * kBlocks);
    CHECK(squares > 0);
    CHECK(std::fabs(sum) < 4 * std::sqrt(squares));
}

void check_edges() {
    // A positive value never becomes zero, however small it is beside others, and beside a NaN that has a
    // sign.
    constexpr size_t kNan = 5;
    const Array values(4 * kBlockNumel);
    for (size_t i = 0; i < kBlockNumel; ++i) {
        const float value = i % 2 == 0 ? 1e30F : 1e-40F;
        std::memcpy(values.data() + 4 * i, &value, 4);
    }
    constexpr uint32_t kNegativeNan = 0xFFC00000;
    std::memcpy(values.data() + 4 * kNan, &kNegativeNan, 4);
    const Coded coded = encoded(values, kBlockNumel, 0, {0, 0, 0, 0});
    const Array decoded(4 * kBlockNumel);
    decode_int8(coded.codes.data(), coded.scales.data(), decoded.data(), kBlockNumel, 1);
    for (size_t i = 0; i < kBlockNumel; ++i) {
        const float value = float_of(decoded, i);
        CHECK(i == kNan    ? std::isnan(value)
              : i % 2 == 0 ? std::fabs(value / 1e30F - 1) < 0.13F
                           : value > 0 && value < 1e21F);
    }
    // Whatever bytes come, something is decoded, the same by each instruction set.
    std::mt19937_64 random(3);
    const Coded any(100 * kBlockNumel);
    for (size_t i = 0; i < 100 * kBlockNumel; ++i) any.codes.data()[i] = static_cast<unsigned char>(random());
    for (size_t i = 0; i < 400; ++i) any.scales.data()[i] = static_cast<unsigned char>(random());
    const Array expected(400 * kBlockNumel);
    decode_int8(any.codes.data(), any.scales.data(), expected.data(), 100 * kBlockNumel, 1,
                InstructionSet::kBaseline);
    for (const InstructionSet set : kSets) {
        if (!has_instruction_set(set)) continue;
        const Array found(400 * kBlockNumel);
        decode_int8(any.codes.data(), any.scales.data(), found.data(), 100 * kBlockNumel, 1, set);
        CHECK(found == expected);
    }
}

}  // namespace

int main() {
    for (int kind = 0; kind < static_cast<int>(Values::kEnd); ++kind) {
        const auto values = static_cast<Values>(kind);
        for (const size_t misalignment : {0, 1, 2}) {
            for (const size_t numel : {0, 1, 2, 31, 255, 256, 257, 511, 512, 513, 1000, 65537})
                check_values(values, numel, misalignment, 2);
        }
        for (const unsigned threads : {1, 2, 4}) check_values(values, (1 << 18) + 77, 0, threads);
    }
    check_edges();
    // Windows of several shifts, by their smallest and largest value; and units.
    for (const float smallest : {0.9999F, 0.7F, 1e-3F, 1e-6F}) check_mean(0.9876543F, {smallest, 1.0F});
    check_mean(1.2345e-9F, {1e-9F, 1.0F});
    check_mean(1.5e-41F, {1e-41F, 1e-39F});
    for (const float value : {0.7F, 0.0123F, -1e-4F}) check_mean(value, {1.0F, -0.9F});
    check_mean(2e-39F, {-1e-38F});
    check_mean(0x1.23456p127F, {-0x1.8p126F, 1.0F});
    std::puts("int8_codec: passed");
    return 0;
}
