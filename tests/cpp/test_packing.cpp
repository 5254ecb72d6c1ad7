// Packed records: each value comes back to the bit, instruction sets and threads give the same bytes, nothing
// grows, and what is no packed record is refused. Every array ends where its memory ends.
#include "packing.h"

#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "check.h"

using swapper::InstructionSet;
using swapper::kPackedBlockNumel;
using swapper::kPackedChunkNumel;
using swapper::kPackedEntryBytes;
using swapper::PackedPiece;
using swapper::PackedRecord;

namespace {

const std::vector<InstructionSet> kSets = {InstructionSet::kAvx512, InstructionSet::kAvx2,
                                           InstructionSet::kBaseline};
constexpr size_t kHeaderBytes = 128;  // with the numbers that say where the record ends, at 8
constexpr size_t kEndOffset = 8;

// Tables that are damaged at random. Where threads are watched, which is ten times as slow, fewer.
#if defined(__SANITIZE_THREAD__)
constexpr int kDamaged = 100;
constexpr size_t kEachEntry = 16;
#else
constexpr int kDamaged = 2000;
constexpr size_t kEachEntry = 1;
#endif

size_t aligned(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}
size_t table_bytes(size_t numel) {
    return kPackedEntryBytes * ((numel + kPackedBlockNumel - 1) / kPackedBlockNumel);
}

enum class Values {
    kBits,      // any bits at all, which do not shrink
    kNormal,    // of usual sizes
    kSquares,   // without signs
    kAlike,     // with one exponent
    kSpecial,   // zeros, infinities, NaNs and the ends of ranges
    kDenormal,  // below the smallest normal number, and a little above
    kPositiveDenormal,
    kLarge,   // close to the largest number, infinity and NaNs
    kFew,     // zeros, but for a few
    kZeros,   // nothing but zeros
    kMinus,   // nothing but negative zeros
    kWidest,  // exponents as far apart as they can be
    kMixed,   // each block of another kind
    kEnd,
};

uint32_t value_of(Values values, size_t i, std::mt19937_64& random) {
    constexpr uint32_t kSpecial[] = {0,          0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x80000001,
                                     0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x007FFFFF, 0x3F800000};
    const auto bits = static_cast<uint32_t>(random());
    float value = std::normal_distribution<float>()(random);
    switch (values) {
        case Values::kBits:
            return bits;
        case Values::kNormal:
            break;
        case Values::kSquares:
            value *= value;
            break;
        case Values::kAlike:
            return 0x3F800000 | (bits & 0x7FFFFF);
        case Values::kSpecial:
            return kSpecial[bits % std::size(kSpecial)];
        case Values::kDenormal:
            return bits & 0x80FFFFFF;
        case Values::kPositiveDenormal:
            return bits & 0x7FFFFF;
        case Values::kLarge:
            return 0x7F000000 | bits;
        case Values::kFew:
            return bits % 100 != 0 ? 0 : static_cast<uint32_t>(random());
        case Values::kZeros:
            return 0;
        case Values::kMinus:
            return 0x80000000;
        case Values::kWidest:
            return (i % 2 == 0 ? 0x00800000 : 0x7F000000) | (bits & 0x7FFFFF);
        case Values::kMixed:
            return value_of(static_cast<Values>(i / kPackedBlockNumel % static_cast<size_t>(Values::kMixed)),
                            i, random);
        case Values::kEnd:
            break;
    }
    uint32_t result = 0;
    std::memcpy(&result, &value, 4);
    return result;
}

// A record whose memory ends where it ends, with tables before its pieces, and a tail.
struct Record {
    std::vector<PackedPiece> pieces;
    size_t tail = 0;
    size_t tail_bytes = 0;
    size_t length = 0;
    std::unique_ptr<unsigned char[]> memory;

    explicit Record(const std::vector<size_t>& numels, size_t tail_bytes_ = 0) : tail_bytes(tail_bytes_) {
        size_t cursor = kHeaderBytes;
        for (const size_t numel : numels) {
            pieces.push_back({0, numel, cursor});
            cursor += aligned(table_bytes(numel));
        }
        for (PackedPiece& piece : pieces) {
            piece.values_offset = cursor;
            cursor += aligned(4 * piece.numel);
        }
        tail = cursor;
        length = cursor + tail_bytes;
        memory.reset(new unsigned char[length]());
    }
    Record(const Record& other)
        : pieces(other.pieces),
          tail(other.tail),
          tail_bytes(other.tail_bytes),
          length(other.length),
          memory(new unsigned char[other.length]) {
        std::memcpy(memory.get(), other.memory.get(), length);
    }
    Record& operator=(const Record&) = delete;

    void fill(Values values, uint64_t seed) {
        std::mt19937_64 random(seed);
        for (const PackedPiece& piece : pieces) {
            for (size_t i = 0; i < piece.numel; ++i) {
                const uint32_t value = value_of(values, i, random);
                std::memcpy(memory.get() + piece.values_offset + 4 * i, &value, 4);
            }
        }
        for (size_t i = 0; i < tail_bytes; ++i) memory[tail + i] = static_cast<unsigned char>(random());
    }
    PackedRecord record() const { return {memory.get(), length, kEndOffset, pieces, tail, tail_bytes}; }

    // All values and the tail are those of `other`.
    bool same(const Record& other) const {
        bool is_same = std::memcmp(memory.get() + tail, other.memory.get() + tail, tail_bytes) == 0;
        for (const PackedPiece& piece : pieces) {
            is_same = is_same && std::memcmp(memory.get() + piece.values_offset,
                                             other.memory.get() + piece.values_offset, 4 * piece.numel) == 0;
        }
        return is_same;
    }
    uint64_t end() const {
        uint64_t value = 0;
        std::memcpy(&value, memory.get() + kEndOffset, 8);
        return value;
    }
};

std::vector<size_t> check_record(Values values, const std::vector<size_t>& numels, size_t tail_bytes,
                                 unsigned threads) {
    Record original(numels, tail_bytes);
    original.fill(values, std::accumulate(numels.begin(), numels.end(), size_t{1}));
    Record packed(original);
    const std::vector<size_t> offsets = pack_record(packed.record(), 1, InstructionSet::kBaseline);
    CHECK(offsets.size() == numels.size() + 2);
    CHECK(offsets.back() <= original.length && packed.end() == offsets[numels.size()]);
    CHECK(packed_offsets(packed.record()) == offsets);
    for (size_t i = 0; i < numels.size(); ++i) {
        CHECK(offsets[i] <= original.pieces[i].values_offset);
        const unsigned char* const table = packed.memory.get() + original.pieces[i].table_offset;
        const size_t bytes = offsets[i + 1] - offsets[i];
        CHECK(swapper::packed_bytes(table, numels[i]) == bytes);
        // A tensor alone, in memory that ends where it ends.
        const std::unique_ptr<unsigned char[]> data(new unsigned char[bytes]);
        const std::unique_ptr<unsigned char[]> found(new unsigned char[4 * numels[i]]);
        std::memcpy(data.get(), packed.memory.get() + offsets[i], bytes);
        swapper::unpack_values(table, data.get(), bytes, found.get(), numels[i], threads);
        CHECK(std::memcmp(found.get(), original.memory.get() + original.pieces[i].values_offset,
                          4 * numels[i]) == 0);
    }
    for (const InstructionSet set : kSets) {
        if (!has_instruction_set(set)) continue;
        Record again(original);
        CHECK(pack_record(again.record(), threads, set) == offsets);
        CHECK(std::memcmp(again.memory.get(), packed.memory.get(), offsets.back()) == 0);
        unpack_record(again.record(), threads, set);
        CHECK(again.same(original) && again.end() == ~uint64_t{0});
    }
    unpack_record(packed.record(), threads, InstructionSet::kBaseline);
    CHECK(packed.same(original));
    return offsets;
}

void check_sizes() {
    constexpr size_t kBlocks = 256;
    const size_t numel = kBlocks * kPackedBlockNumel;
    const auto bytes = [numel](Values values) {
        const std::vector<size_t> offsets = check_record(values, {numel}, 0, 1);
        return offsets[1] - offsets[0];
    };
    CHECK(bytes(Values::kZeros) == 0);
    CHECK(bytes(Values::kAlike) == kBlocks * 768);              // three bytes a value
    CHECK(bytes(Values::kMinus) == kBlocks * 768);              // signs have room there
    CHECK(bytes(Values::kPositiveDenormal) == kBlocks * 768);   // no exponent at all
    CHECK(bytes(Values::kBits) == 4 * numel);                   // as it is
    CHECK(bytes(Values::kWidest) == kBlocks * (768 + 7 * 32));  // eight bits, without signs
    CHECK(bytes(Values::kNormal) < 4 * numel * 89 / 100);
}

void check_refused(const Record& packed) {
    Record copy(packed);
    CHECK_THROWS(std::invalid_argument, unpack_record(copy.record(), 2));
    CHECK(std::memcmp(copy.memory.get(), packed.memory.get(), packed.length) == 0);
    CHECK_THROWS(std::invalid_argument, packed_offsets(copy.record()));
}

// Whatever the table says, nothing is read or written beyond the record, and each bit that is another is
// noticed.
void check_damage() {
    Record packed({1000, kPackedChunkNumel + 300}, 77);
    packed.fill(Values::kMixed, 5);
    pack_record(packed.record(), 1);
    for (const PackedPiece& piece : packed.pieces) {
        for (size_t i = 0; i < table_bytes(piece.numel); i += i < 8 ? 1 : kEachEntry) {
            for (const unsigned change : {0x01U, 0x08U, 0x0FU, 0x10U, 0x20U, 0x40U, 0x80U, 0xFFU}) {
                Record damaged(packed);
                damaged.memory[piece.table_offset + i] ^= static_cast<unsigned char>(change);
                check_refused(damaged);
            }
        }
    }
    for (const uint64_t end : {uint64_t{0}, packed.end() - 1, packed.end() + 64, ~uint64_t{0}}) {
        Record damaged(packed);
        std::memcpy(damaged.memory.get() + kEndOffset, &end, 8);
        check_refused(damaged);
    }
    std::mt19937_64 random(1);
    for (int round = 0; round < kDamaged; ++round) {
        Record any(packed);
        for (const PackedPiece& piece : any.pieces) {
            for (size_t i = 0; i < table_bytes(piece.numel); ++i) {
                any.memory[piece.table_offset + i] =
                    static_cast<unsigned char>(i % 2 == 0       ? random()
                                               : round % 2 == 0 ? random()
                                                                : 1 + random() % 9);
            }
        }
        check_refused(any);
    }
}

void check_shapes() {
    Record record({300, 500}, 10);
    const auto refused = [](const PackedRecord& wrong) {
        CHECK_THROWS(std::invalid_argument, pack_record(wrong, 1));
        CHECK_THROWS(std::invalid_argument, unpack_record(wrong, 1));
    };
    PackedRecord wrong = record.record();
    wrong.length_bytes -= 1;
    refused(wrong);
    wrong = record.record();
    wrong.tail_offset += 64;
    refused(wrong);
    wrong = record.record();
    wrong.tail_bytes = std::numeric_limits<size_t>::max();
    refused(wrong);
    wrong = record.record();
    wrong.end_offset = std::numeric_limits<size_t>::max() - 4;
    refused(wrong);
    wrong = record.record();
    std::swap(wrong.pieces[0], wrong.pieces[1]);
    refused(wrong);
    wrong = record.record();
    wrong.pieces[1].numel = std::numeric_limits<size_t>::max() / 2;
    refused(wrong);
    wrong = record.record();
    wrong.pieces[1].table_offset = wrong.pieces[0].values_offset - 1;
    refused(wrong);
    wrong = record.record();
    wrong.pieces.clear();
    refused(wrong);
    // Of a tensor alone.
    pack_record(record.record(), 1);
    const unsigned char* const table = record.memory.get() + record.pieces[0].table_offset;
    const size_t bytes = swapper::packed_bytes(table, 300);
    std::vector<unsigned char> values(1200);
    CHECK_THROWS(std::invalid_argument,
                 (swapper::unpack_values(table, values.data(), bytes - 64, values.data(), 300, 1), 0));
}

}  // namespace

int main() {
    for (int kind = 0; kind < static_cast<int>(Values::kEnd); ++kind) {
        const auto values = static_cast<Values>(kind);
        for (size_t numel = 0; numel <= 2 * kPackedBlockNumel + 1; numel += numel < 4 ? 1 : 61) {
            check_record(values, {numel}, numel % 5, 1);
        }
        check_record(values, {1000, 0, 64, 4096, 257}, 1001, 2);
        for (const unsigned threads : {1, 2, 3}) {
            check_record(values, {2 * kPackedChunkNumel + 77, 300, kPackedChunkNumel - 64, 1 << 18}, 513,
                         threads);
        }
    }
    // Every length that the last block can have.
    for (size_t numel = 0; numel < kPackedBlockNumel; numel += kEachEntry) {
        check_record(Values::kMixed, {kPackedBlockNumel + numel, 64}, 3, 1);
    }
    check_sizes();
    check_damage();
    check_shapes();
    return 0;
}
