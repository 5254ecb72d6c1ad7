// What a file should hold: a CRC-32C of each block of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace swapper {

// Kept beside a file by whoever writes all of it through transfers that are given this object: a write sets
// the values of the blocks that it covers, a read is checked against them. Not synchronised: two transfers of
// one block must not overlap in time, as they must not in the file.
class Checksums {
  public:
    // For the first `length` bytes of a file, in blocks of `block_bytes` from its start.
    Checksums(uint64_t length, uint64_t block_bytes) : length_(length), block_bytes_(block_bytes) {
        if (block_bytes == 0 || block_bytes % 4096 != 0) {
            throw std::invalid_argument("block_bytes is not a positive multiple of 4096");
        }
        blocks_.resize(length / block_bytes + (length % block_bytes != 0 ? 1 : 0));
    }

    uint64_t length() const { return length_; }
    uint64_t block_bytes() const { return block_bytes_; }

    // `length` bytes at `data` go to or came from `offset`, the start of a block; they end at the end of a
    // block, or where the transfer ends.

    // Notes them as what the file holds.
    void record(uint64_t offset, const char* data, uint64_t length);
    // Whether the block at `offset` was written with exactly this length.
    bool covers(uint64_t offset, uint64_t length) const {
        return blocks_.at(offset / block_bytes_).length == length;
    }
    // The offset of the first block that is not as it was recorded, or `offset + length` if all are.
    uint64_t first_difference(uint64_t offset, const char* data, uint64_t length) const;
    // The CRC-32C of the first `length` bytes of the file, as they were recorded. Throws
    // std::invalid_argument where a block of them was not recorded, or ends elsewhere.
    uint32_t joined(uint64_t length) const;

  private:
    struct Block {
        uint32_t crc = 0;
        uint32_t length = 0;  // how much of the block was written; 0: nothing is known of it
    };

    uint64_t length_;
    uint64_t block_bytes_;
    std::vector<Block> blocks_;
};

}  // namespace swapper
