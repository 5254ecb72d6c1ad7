// CRC-32C (Castagnoli), the checksum of a record's bytes.
//
// As in RFC 3720 (iSCSI), appendix B.4: polynomial 0x1EDC6F41, bits reflected, initial value and final
// exclusive-or all ones. The check value of "123456789" is 0xE3069283.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace swapper {

// The CRC-32C of `length` bytes at `data`. `seed` is the checksum of what came before (0: nothing did),
// so that crc32c(b, n, crc32c(a, m)) is the checksum of a followed by b.
//
// `data` may have any alignment and may be null where `length` is 0. Up to `threads` threads share the
// work where it is long enough to pay; the result does not depend on their number.
std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t seed = 0, unsigned threads = 1);

// The checksums of several runs of bytes, each at an address and of a length, on up to `threads` threads of
// crew.h. A run is one thread's.
std::vector<std::uint32_t> crc32c_each(const std::vector<std::pair<const void*, std::size_t>>& runs,
                                       unsigned threads);

// The checksum of a followed by b, from the checksums of both. `shift_b` is crc32c_shift() of b's length, so
// that it is computed once for many of one length.
std::uint32_t crc32c_join(std::uint32_t crc_a, std::uint32_t crc_b, std::uint32_t shift_b);
std::uint32_t crc32c_shift(std::size_t length);

// The same checksum without carry-less multiplication of 512 bits at a time, which crc32c() uses where the
// processor has it. Public for the same reason as the next.
std::uint32_t crc32c_unfolded(const void* data, std::size_t length, std::uint32_t seed = 0);

// The same checksum by table, with no instruction that a processor may lack: what crc32c() falls back
// to. About a tenth of the speed. Public so that it is tested where the fallback is never taken.
std::uint32_t crc32c_by_table(const void* data, std::size_t length, std::uint32_t seed = 0);

}  // namespace swapper
