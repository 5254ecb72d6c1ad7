#include "checksums.h"

#include <string>

#include "crc32c.h"

namespace swapper {

void Checksums::record(uint64_t offset, const char* data, uint64_t length) {
    for (uint64_t at = 0; at < length; at += block_bytes_) {
        const uint64_t piece = std::min(block_bytes_, length - at);
        blocks_.at((offset + at) / block_bytes_) = {crc32c(data + at, piece), static_cast<uint32_t>(piece)};
    }
}

uint64_t Checksums::first_difference(uint64_t offset, const char* data, uint64_t length) const {
    for (uint64_t at = 0; at < length; at += block_bytes_) {
        const uint64_t piece = std::min(block_bytes_, length - at);
        const Block& block = blocks_.at((offset + at) / block_bytes_);
        // A block of which more or less was written than is read now cannot be checked, so it is not trusted.
        if (block.length != piece || block.crc != crc32c(data + at, piece)) return offset + at;
    }
    return offset + length;
}

uint32_t Checksums::joined(uint64_t length) const {
    if (length > length_) throw std::invalid_argument("beyond what the checksums cover");
    const uint32_t shift = crc32c_shift(block_bytes_);
    uint32_t crc = 0;
    for (uint64_t offset = 0; offset < length; offset += block_bytes_) {
        const uint64_t piece = std::min(block_bytes_, length - offset);
        const Block& block = blocks_[offset / block_bytes_];
        if (block.length != piece) {
            throw std::invalid_argument("the block at byte " + std::to_string(offset) +
                                        " was not written with this length");
        }
        crc = crc32c_join(crc, block.crc, piece == block_bytes_ ? shift : crc32c_shift(piece));
    }
    return crc;
}

}  // namespace swapper
