// Packed bf16: each value comes back to the bit, instruction sets and threads give the same, nothing grows by
// more than its table, and what was not packed so is refused. Every array ends where its memory ends.
#include "bf16_packing.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "check.h"

using swapper::InstructionSet;
using swapper::kBf16ChunkNumel;
using swapper::kBf16EntryBytes;
using swapper::kBf16HeadBytes;

namespace {

const std::vector<InstructionSet> kSets = {InstructionSet::kAvx512, InstructionSet::kAvx2,
                                           InstructionSet::kBaseline};

// Places that are damaged at random. Where threads are watched, which is ten times as slow, fewer.
#if defined(__SANITIZE_THREAD__)
constexpr int kDamaged = 100;
constexpr size_t kEachLength = 16;
#else
constexpr int kDamaged = 3000;
constexpr size_t kEachLength = 1;
#endif

enum class Values {
    kBits,    // any bits at all, which do not shrink
    kNormal,  // of usual sizes
    kWide,    // of many exponents, and shrinks
    kAlike,   // with one exponent
    kSpecial,
    kZeros,
    kEnd,
};

Array make(Values kind, size_t numel, uint64_t seed) {
    constexpr uint16_t kSpecial[] = {0,      0x8000, 0x7F7F, 0xFF7F, 0x0001, 0x8001,
                                     0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x007F, 0x3F80};
    std::mt19937_64 random(seed);
    Array values(2 * numel);
    for (size_t i = 0; i < numel; ++i) {
        const uint64_t any = random();
        float value = std::normal_distribution<float>(0, 0.02F)(random);
        if (kind == Values::kWide) value *= std::exp2(static_cast<float>(any % 24));
        uint32_t wide = 0;
        std::memcpy(&wide, &value, 4);
        auto bits = static_cast<uint16_t>(wide >> 16);
        if (kind == Values::kBits) bits = static_cast<uint16_t>(any);
        if (kind == Values::kAlike) bits = static_cast<uint16_t>(0x3F80 | (any & 0x807F));
        if (kind == Values::kSpecial) bits = kSpecial[any % std::size(kSpecial)];
        if (kind == Values::kZeros) bits = 0;
        std::memcpy(values.data() + 2 * i, &bits, 2);
    }
    return values;
}

// What is packed of some values, without a byte more.
Array packed(const Array& values, size_t numel, unsigned threads) {
    const size_t most = swapper::packed_bf16_bytes_most(numel);
    const Array room(most);
    const size_t length = swapper::pack_bf16(values.data(), numel, room.data(), threads);
    CHECK(length <= most && length % 64 == 0);
    Array exact(length);
    std::memcpy(exact.data(), room.data(), length);
    return exact;
}

size_t length_of(const Array& array) {
    uint64_t length = 0;
    std::memcpy(&length, array.data() + 16, 8);
    return static_cast<size_t>(length);
}

Array copy_of(const Array& array, size_t length) {
    Array copy(length);
    std::memcpy(copy.data(), array.data(), length);
    return copy;
}

void check_values(const Array& values, size_t numel, unsigned threads) {
    const Array found = packed(values, numel, threads);
    CHECK(found == packed(values, numel, 1));
    for (const InstructionSet set : kSets) {
        if (!swapper::has_instruction_set(set)) continue;
        const Array back(2 * numel, 6);
        swapper::unpack_bf16(found.data(), length_of(found), back.data(), numel, threads, set);
        CHECK(back == values);
        // Over itself, where it ends as the values do: what is before them is the table, or more.
        const size_t length = length_of(found);
        const size_t before = kBf16HeadBytes + kBf16EntryBytes * (numel / kBf16ChunkNumel + 1) + 64;
        const size_t all = before + 2 * numel + 64;
        const Array memory(all);
        std::memcpy(memory.data() + all - length, found.data(), length);
        swapper::unpack_bf16(memory.data() + all - length, length, memory.data() + before, numel, threads,
                             set);
        CHECK(std::memcmp(memory.data() + before, values.data(), 2 * numel) == 0);
    }
}

// All 65536 values, in order and mixed with usual ones.
void check_every_value() {
    const size_t numel = size_t{1} << 16;
    const Array values = make(Values::kNormal, 4 * numel, 1);
    for (size_t i = 0; i < numel; ++i) {
        const auto bits = static_cast<uint16_t>(i);
        std::memcpy(values.data() + 8 * i, &bits, 2);
    }
    check_values(values, 4 * numel, 2);
    const Array ordered(2 * numel);
    for (size_t i = 0; i < numel; ++i) std::memcpy(ordered.data() + 2 * i, values.data() + 8 * i, 2);
    check_values(ordered, numel, 1);
}

// Usual weights take less than 11 bits, and what cannot shrink no more than its table and zeros.
void check_sizes() {
    const size_t numel = size_t{1} << 20;
    CHECK(length_of(packed(make(Values::kNormal, numel, 2), numel, 2)) * 8 < numel * 11);
    CHECK(length_of(packed(make(Values::kAlike, numel, 2), numel, 2)) * 8 < numel * 11);
    const size_t most = kBf16HeadBytes + 2 * numel + kBf16EntryBytes * numel / kBf16ChunkNumel + 63;
    CHECK(length_of(packed(make(Values::kBits, numel, 2), numel, 2)) <= most);
    CHECK_THROWS(std::length_error, swapper::packed_bf16_bytes_most(std::numeric_limits<size_t>::max() / 2));
}

// What is damaged is refused with nothing written, or becomes some values: never more is read or written.
void check_damage() {
    std::mt19937_64 random(3);
    int refused = 0;
    for (int i = 0; i < kDamaged; ++i) {
        const size_t numel = 1 + random() % 9000;
        const Array values = make(static_cast<Values>(i % static_cast<int>(Values::kEnd)), numel, random());
        const Array right = packed(values, numel, 1);
        const size_t length = length_of(right);
        const Array wrong = copy_of(right, length);
        const size_t table = kBf16HeadBytes + kBf16EntryBytes * ((numel - 1) / kBf16ChunkNumel + 1);
        for (size_t many = 1 + random() % 3; many != 0; --many) {
            const size_t within = random() % 4 != 0 ? table : length;
            wrong.data()[random() % within] ^= static_cast<unsigned char>(1U << random() % 8);
        }
        for (const InstructionSet set : kSets) {
            if (!swapper::has_instruction_set(set)) continue;
            const Array back(2 * numel);
            std::memset(back.data(), 0xA5, 2 * numel);
            const Array before = copy_of(back, 2 * numel);
            try {
                swapper::unpack_bf16(wrong.data(), length, back.data(), numel, 1 + i % 2, set);
            } catch (const std::invalid_argument&) {
                CHECK(back == before);
                ++refused;
            }
        }
    }
    CHECK(refused > kDamaged / 2);
}

void check_refusals() {
    const size_t numel = 2 * kBf16ChunkNumel + 5;
    const Array values = make(Values::kNormal, numel, 4);
    const Array right = packed(values, numel, 1);
    const size_t length = length_of(right);
    const Array back(2 * numel);
    const auto refuses = [&](const Array& wrong, size_t bytes, size_t count) {
        CHECK_THROWS(std::invalid_argument,
                     (swapper::unpack_bf16(wrong.data(), bytes, back.data(), count, 1), 0));
    };
    for (const size_t cut : {size_t{0}, size_t{31}, size_t{32}, size_t{79}, length - 64, length - 1}) {
        refuses(copy_of(right, cut), cut, numel);
    }
    refuses(right, length, numel - 1);
    refuses(right, length, numel + 1);
    refuses(right, length, std::numeric_limits<size_t>::max());
    for (const size_t at : {0, 8, 16, 24, 28}) {
        const Array wrong = copy_of(right, length);
        wrong.data()[at] ^= 1;
        refuses(wrong, length, numel);
    }
    // One more escape in a table whose lengths are right: as many as it says are counted.
    const Array wrong = copy_of(right, length);
    uint16_t escapes = 0;
    std::memcpy(&escapes, wrong.data() + kBf16HeadBytes + 10, 2);
    escapes = static_cast<uint16_t>(escapes % 32 != 0 ? escapes + 1 : escapes - 1);
    std::memcpy(wrong.data() + kBf16HeadBytes + 10, &escapes, 2);
    refuses(wrong, length, numel);
    // Over what is still to be read.
    const Array memory(length + 2 * numel);
    std::memcpy(memory.data(), right.data(), length);
    CHECK_THROWS(std::invalid_argument,
                 (swapper::unpack_bf16(memory.data(), length, memory.data(), numel, 1), 0));
    CHECK(std::memcmp(memory.data(), right.data(), length) == 0);
}

}  // namespace

int main() {
    for (int kind = 0; kind < static_cast<int>(Values::kEnd); ++kind) {
        const auto values = static_cast<Values>(kind);
        for (size_t numel = 0; numel <= 600; numel += kEachLength) {
            check_values(make(values, numel, numel), numel, 1);
        }
        for (const size_t numel : {kBf16ChunkNumel - 1, kBf16ChunkNumel, kBf16ChunkNumel + 1,
                                   20 * kBf16ChunkNumel + 33, 200 * kBf16ChunkNumel}) {
            for (const unsigned threads : {1, 3}) check_values(make(values, numel, 9), numel, threads);
        }
    }
    check_every_value();
    check_sizes();
    check_damage();
    check_refusals();
    return 0;
}
