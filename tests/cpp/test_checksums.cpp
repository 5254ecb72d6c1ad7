// CRC-32C, CRC-32, and what a file should hold.
#include "checksums.h"

#include <cstring>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "crc32.h"
#include "crc32c.h"

using swapper::Checksums;
using swapper::copy_crc32;
using swapper::crc32;
using swapper::crc32_by_table;
using swapper::crc32c;
using swapper::crc32c_by_table;
using swapper::crc32c_join;
using swapper::crc32c_shift;
using swapper::crc32c_unfolded;

namespace {

// By the definition, a bit at a time.
uint32_t reference(const char* data, size_t length) {
    uint32_t crc = 0xFFFFFFFF;
    for (size_t i = 0; i < length; ++i) {
        crc ^= static_cast<unsigned char>(data[i]);
        for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ 0x82F63B78 : crc >> 1;
    }
    return ~crc;
}

// The bytes end where their memory ends.
void checksums_agree(size_t length, size_t misalignment, bool compare) {
    const std::unique_ptr<char[]> memory(new char[misalignment + length]);
    char* const data = memory.get() + misalignment;
    fill(data, length, length);
    const uint32_t crc = crc32c(data, length);
    if (compare) CHECK(crc == reference(data, length));
    CHECK(crc == crc32c_by_table(data, length));
    CHECK(crc == crc32c_unfolded(data, length));
    for (const unsigned threads : {2, 3, 7}) CHECK(crc == crc32c(data, length, 0, threads));
    for (const size_t cut : {size_t{0}, length / 3, length}) {
        const uint32_t first = crc32c(data, cut, 0, 2);
        CHECK(crc == crc32c(data + cut, length - cut, first, 2));
        CHECK(crc == crc32c_by_table(data + cut, length - cut, first));
        const uint32_t second = crc32c(data + cut, length - cut);
        CHECK(crc == crc32c_join(first, second, crc32c_shift(length - cut)));
        for (const unsigned threads : {1, 3}) {
            const auto sums = swapper::crc32c_each({{data, cut}, {data + cut, length - cut}}, threads);
            CHECK(sums.size() == 2 && sums[0] == first && sums[1] == second);
        }
    }
}

// The same for CRC-32, and its copy.
void copies_agree(size_t length, size_t misalignment, size_t copy_misalignment) {
    const std::unique_ptr<char[]> memory(new char[misalignment + length]);
    const std::unique_ptr<char[]> copied(new char[copy_misalignment + length]);
    char* const data = memory.get() + misalignment;
    char* const copy = copied.get() + copy_misalignment;
    fill(data, length, length);
    const uint32_t crc = crc32_by_table(data, length, 5);
    CHECK(crc == crc32(data, length, 5));
    CHECK(crc == copy_crc32(copy, data, length, 5));
    CHECK(std::memcmp(copy, data, length) == 0);
}

void difference_is_found() {
    constexpr uint64_t kBlock = 4096;
    constexpr uint64_t kLength = 3 * kBlock + 13;
    const std::unique_ptr<char[]> data(new char[kLength]);
    fill(data.get(), kLength, 1);
    Checksums checksums(2 * kBlock + kLength, kBlock);
    CHECK(checksums.first_difference(2 * kBlock, data.get(), kLength) == 2 * kBlock);  // nothing is known
    checksums.record(2 * kBlock, data.get(), kLength);
    CHECK(checksums.first_difference(2 * kBlock, data.get(), kLength) == 2 * kBlock + kLength);
    CHECK(checksums.first_difference(2 * kBlock, data.get(), kLength - 1) == 5 * kBlock);  // less of the last
    for (uint64_t at = 0; at < kLength; at += 509) {
        data[at] = static_cast<char>(data[at] ^ 1);
        CHECK(checksums.first_difference(2 * kBlock, data.get(), kLength) == (2 + at / kBlock) * kBlock);
        data[at] = static_cast<char>(data[at] ^ 1);
    }
    CHECK_THROWS(std::out_of_range, checksums.record(5 * kBlock, data.get(), 2 * kBlock));
    for (const uint64_t wrong : {uint64_t{0}, uint64_t{1000}})
        CHECK_THROWS(std::invalid_argument, Checksums(kLength, wrong));
}

void blocks_are_joined() {
    constexpr uint64_t kBlock = 4096;
    constexpr uint64_t kLength = 3 * kBlock + 13;
    const std::unique_ptr<char[]> data(new char[kLength]);
    fill(data.get(), kLength, 2);
    Checksums checksums(kLength + kBlock, kBlock);
    CHECK(checksums.joined(0) == 0);
    CHECK_THROWS(std::invalid_argument, checksums.joined(1));  // nothing is known
    checksums.record(0, data.get(), kLength);
    for (const uint64_t length : {uint64_t{0}, kBlock, 3 * kBlock, kLength})
        CHECK(checksums.joined(length) == crc32c(data.get(), length));
    for (const uint64_t length : {kLength - 1, kLength + 1, kBlock - 1, kLength + kBlock + 1})
        CHECK_THROWS(std::invalid_argument, checksums.joined(length));
}

}  // namespace

int main() {
    CHECK(crc32c("123456789", 9) == 0xE3069283);
    CHECK(crc32c(nullptr, 0) == 0);
    CHECK(crc32("123456789", 9) == 0xCBF43926);
    CHECK(crc32(nullptr, 0) == 0);
    for (const size_t misalignment : {0, 1, 8}) {
        for (const size_t copy_misalignment : {0, 3, 16}) {
            for (size_t length = 0; length < 200; ++length)
                copies_agree(length, misalignment, copy_misalignment);
            copies_agree(200003, misalignment, copy_misalignment);
        }
    }
    for (const size_t misalignment : {0, 1, 3, 8}) {
        for (size_t length = 0; length < 40; ++length) checksums_agree(length, misalignment, true);
        for (const size_t length : {1000, 4095, 4096, 24577, 100001})
            checksums_agree(length, misalignment, true);
    }
    checksums_agree((5 << 20) + 77, 1, false);
    difference_is_found();
    blocks_are_joined();
    std::puts("checksums: passed");
    return 0;
}
