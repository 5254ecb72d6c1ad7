// A checksum of 32 bits by table, of any polynomial: what the two of crc32.h and crc32c.h fall back to.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "eight bytes are taken as one little-endian word");

namespace swapper {

// [k][v]: the byte v followed by k zero bytes. Row 0 is the usual table; with the others eight bytes are
// looked up at once ("slicing by 8", Kounavis and Berry 2005). The bits of `polynomial` are reflected.
constexpr std::array<std::array<std::uint32_t, 256>, 8> make_byte_tables(std::uint32_t polynomial) {
    std::array<std::array<std::uint32_t, 256>, 8> tables{};
    for (std::uint32_t v = 0; v < 256; ++v) {
        std::uint32_t crc = v;
        for (int i = 0; i < 8; ++i) crc = (crc & 1) != 0 ? (crc >> 1) ^ polynomial : crc >> 1;
        tables[0][v] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k) {
        for (std::size_t v = 0; v < 256; ++v) {
            const std::uint32_t crc = tables[k - 1][v];
            tables[k][v] = (crc >> 8) ^ tables[0][crc & 0xFF];
        }
    }
    return tables;
}

template <std::uint32_t polynomial>
constexpr auto kByteTables = make_byte_tables(polynomial);

// Little-endian, from any address.
inline std::uint64_t load_word(const unsigned char* data) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, sizeof word);
    return word;
}

// Takes and returns the register, which is the checksum's complement.
template <std::uint32_t polynomial>
std::uint32_t update_by_table(std::uint32_t crc, const unsigned char* data, std::size_t length) {
    constexpr auto& tables = kByteTables<polynomial>;
    for (; length >= 8; data += 8, length -= 8) {
        const std::uint64_t word = load_word(data) ^ crc;
        crc = 0;
        for (std::size_t i = 0; i < 8; ++i) crc ^= tables[7 - i][(word >> (8 * i)) & 0xFF];
    }
    for (; length != 0; ++data, --length) crc = (crc >> 8) ^ tables[0][(crc ^ *data) & 0xFF];
    return crc;
}

}  // namespace swapper
