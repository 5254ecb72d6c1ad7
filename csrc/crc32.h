// CRC-32 as in ZIP and gzip, the checksum of a record in a file of `torch.save`, and a copy that computes it.
//
// As in RFC 1952, section 8: polynomial 0x04C11DB7, bits reflected, initial value and final exclusive-or
// all ones. The check value of "123456789" is 0xCBF43926.

#pragma once

#include <cstddef>
#include <cstdint>

namespace swapper {

// The CRC-32 of `length` bytes at `data`. `seed` is the checksum of what came before (0: nothing did).
// `data` may have any alignment and may be null where `length` is 0.
std::uint32_t crc32(const void* data, std::size_t length, std::uint32_t seed = 0);

// Copies `length` bytes, which must not overlap, and returns their CRC-32: one way through memory for both.
// Any alignment will do; a destination at a multiple of 16 is faster, and past the caches.
std::uint32_t copy_crc32(void* destination, const void* source, std::size_t length, std::uint32_t seed = 0);

// crc32() by table, with no instruction that a processor may lack: what it falls back to. Public so that
// it is tested where the fallback is never taken.
std::uint32_t crc32_by_table(const void* data, std::size_t length, std::uint32_t seed = 0);

}  // namespace swapper
