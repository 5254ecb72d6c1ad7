#include "checksums.h"

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

}  // namespace swapper
