// fp32 values of a record in fewer bytes, to the bit: the exponents of 256 elements take the bits of their
// range.
//
// [Note: packed blocks]
// Each tensor is cut into blocks of 256 elements, and each block has an entry of two bytes in a table of its
// own: its base, and its form. The bits of a value are cut into its last 16, its next 7, its exponent and its
// sign. The exponent is stored as
//
//     exponent - base                where the block has no exponent of 0, and base is the smallest
//     0, or exponent - base          where it has, as zeros and denormals do; base is the smallest other,
//     less 1
//
// and the sign as one more bit, the lowest, where any value of the block has one. Both together are the code,
// of `bits` bits, 1 to 8:
//
//     form     bits | 16 if there are signs | 32 if there are exponents of 0
//     data     last 16 bits of each value      512 bytes
//              next 7, and above the code's lowest    256 bytes
//              each further bit of the code, from the second on, of all values     32 bytes each
//
// A block that would not shrink, or is shorter than 256, has form 9: its values as they are. One of nothing
// but zeros without a sign has form 0, and no data. So data is never longer than the values: where a tensor
// does not shrink the table is all that is added. The data of 256 blocks, a chunk, ends at a multiple of 32,
// behind zeros.
//
// A record is packed where it lies. Its pieces follow one another, and data goes to the front, never past the
// value that is read next; unpacking goes backward. Two numbers of 8 bytes in the record say where its packed
// values end, and the CRC-32C of its tables, of which a bit stands for 256 values. In one that is not packed
// they are all ones: so nothing else has to remember which of them a buffer has, and pages that a drive has
// lost, which are zeros, are neither. The tail has no part in it: how long that is, others say.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "step_program.h"

namespace swapper {

// Elements of a block that is packed, the bytes of its entry in the table, and elements of a chunk.
constexpr std::size_t kPackedBlockNumel = 256;
constexpr std::size_t kPackedEntryBytes = 2;
constexpr std::size_t kPackedChunkNumel = 256 * kPackedBlockNumel;
// Bytes of the numbers that say whether a record is packed.
constexpr std::size_t kPackedEndBytes = 16;

// A tensor of a record: offsets of its values as they are, and of its table.
struct PackedPiece {
    std::size_t values_offset;
    std::size_t numel;
    std::size_t table_offset;
};

// A record of `length_bytes`, all of which may be written.
//
// Pieces begin at multiples of 64 and follow one another; behind the last is the tail. Nothing else lies
// between the first and the end of the tail. `end_offset` is that of the numbers that say whether it is
// packed.
struct PackedRecord {
    void* data;
    std::size_t length_bytes;
    std::size_t end_offset;
    std::vector<PackedPiece> pieces;
    std::size_t tail_offset;
    std::size_t tail_bytes;
};

// Packs a record in place. Up to `threads` threads share the work; what is written does not depend on their
// number, nor on `set`.
//
// Returns the offsets at which the data of each piece, and the tail, now begin, and the end of the tail.
//
// Throws std::invalid_argument, with nothing written, where the record is not as described.
std::vector<std::size_t> pack_record(const PackedRecord& record, unsigned threads,
                                     InstructionSet set = best_instruction_set());

// As pack_record() has returned them, of a record that is packed.
//
// Throws std::invalid_argument where it is not, or its tables, or its end, are not those of such a record.
std::vector<std::size_t> packed_offsets(const PackedRecord& record);

// The inverse of pack_record(). Throws as packed_offsets(), with nothing written.
void unpack_record(const PackedRecord& record, unsigned threads, InstructionSet set = best_instruction_set());

// The bytes of the first `numel` elements of a tensor, whose table begins at `table`: whole chunks, or all of
// it.
//
// Throws std::invalid_argument where the table is none.
std::size_t packed_bytes(const void* table, std::size_t numel);

// Writes `numel` values that are packed in `length_bytes` at `data`, from the first of a chunk on, to
// `values`.
//
// Throws std::invalid_argument, with nothing written, where the table is none, or is of another length.
void unpack_values(const void* table, const void* data, std::size_t length_bytes, void* values,
                   std::size_t numel, unsigned threads, InstructionSet set = best_instruction_set());

}  // namespace swapper
