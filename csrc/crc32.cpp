#include "crc32.h"

#include <algorithm>
#include <cstring>

#include "crc_table.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#include <wmmintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace swapper {
namespace {

// 0x04C11DB7 with its bits reflected.
constexpr std::uint32_t kPolynomial = 0xEDB88320;

// The functions named `update` take and return the register, which is the checksum's complement.

#if defined(__x86_64__)
#define CRC32_TARGET __attribute__((target("pclmul,sse2")))

bool hardware_present() {
    return __builtin_cpu_supports("pclmul") != 0;
}

// `next` with `sum` added, moved on by the distance that the two halves of `factors` stand for.
CRC32_TARGET inline __m128i fold(__m128i sum, __m128i factors, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(sum, factors, 0x00);
    const __m128i high = _mm_clmulepi64_si128(sum, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Folding by carry-less multiplication: Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction" (Intel, 2009), whose constants these are: x^(512 + 32), x^(512 - 32), and the same
// with 128, modulo the polynomial, reflected. Sixteen bytes are left, and go through the table.
//
// With `copying`, what was loaded is stored, past the caches: nobody reads it soon. `copy` is then at a
// multiple of 16.
template <bool copying>
CRC32_TARGET std::uint32_t update_by_hardware(std::uint32_t crc, unsigned char* copy,
                                              const unsigned char* data, std::size_t length) {
    if (length < 64) {
        if (copying) std::memcpy(copy, data, length);
        return update_by_table<kPolynomial>(crc, data, length);
    }
    const __m128i by_64_bytes = _mm_set_epi64x(0x01C6E41596, 0x0154442BD4);
    const __m128i by_16_bytes = _mm_set_epi64x(0x00CCAA009E, 0x01751997D0);
    const auto load = [&](std::size_t offset) CRC32_TARGET {
        const __m128i vector = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + offset));
        if (copying) _mm_stream_si128(reinterpret_cast<__m128i*>(copy + offset), vector);
        return vector;
    };
    const auto advance = [&](std::size_t by) {
        data += by;
        length -= by;
        if (copying) copy += by;
    };
    __m128i a = _mm_xor_si128(load(0), _mm_cvtsi32_si128(static_cast<int>(crc)));
    __m128i b = load(16);
    __m128i c = load(32);
    __m128i d = load(48);
    advance(64);
    while (length >= 64) {
        a = fold(a, by_64_bytes, load(0));
        b = fold(b, by_64_bytes, load(16));
        c = fold(c, by_64_bytes, load(32));
        d = fold(d, by_64_bytes, load(48));
        advance(64);
    }
    a = fold(fold(fold(a, by_16_bytes, b), by_16_bytes, c), by_16_bytes, d);
    while (length >= 16) {
        a = fold(a, by_16_bytes, load(0));
        advance(16);
    }
    if (copying) {
        _mm_sfence();
        std::memcpy(copy, data, length);
    }
    unsigned char rest[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), a);
    return update_by_table<kPolynomial>(update_by_table<kPolynomial>(0, rest, sizeof rest), data, length);
}

#elif defined(__aarch64__)

bool hardware_present() {
    constexpr unsigned long kCrc32 = 1UL << 7;  // HWCAP_CRC32 of <asm/hwcap.h>
    return (getauxval(AT_HWCAP) & kCrc32) != 0;
}

// Assembly for the reason given in crc32c.cpp.
template <bool copying>
std::uint32_t update_by_hardware(std::uint32_t crc, unsigned char* copy, const unsigned char* data,
                                 std::size_t length) {
    if (copying) std::memcpy(copy, data, length);
    for (; length >= 8; data += 8, length -= 8) {
        asm(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(crc) : "r"(load_word(data)));
    }
    return update_by_table<kPolynomial>(crc, data, length);
}

#else

bool hardware_present() {
    return false;
}
template <bool copying>
std::uint32_t update_by_hardware(std::uint32_t crc, unsigned char* copy, const unsigned char* data,
                                 std::size_t length) {
    if (copying) std::memcpy(copy, data, length);
    return update_by_table<kPolynomial>(crc, data, length);
}

#endif

// So much is still in the cache when it is read again.
constexpr std::size_t kCopiedAtOnce = std::size_t{64} << 10;

// `copy` may be null: nothing is copied.
std::uint32_t update(std::uint32_t crc, unsigned char* copy, const unsigned char* data, std::size_t length) {
    static const bool present = hardware_present();
    if (copy == nullptr) {
        return present ? update_by_hardware<false>(crc, nullptr, data, length)
                       : update_by_table<kPolynomial>(crc, data, length);
    }
    if (present && reinterpret_cast<std::uintptr_t>(copy) % 16 == 0) {
        return update_by_hardware<true>(crc, copy, data, length);
    }
    for (std::size_t done = 0; done < length; done += kCopiedAtOnce) {
        const std::size_t part = std::min(kCopiedAtOnce, length - done);
        crc = update(crc, nullptr, data + done, part);
        std::memcpy(copy + done, data + done, part);
    }
    return crc;
}

}  // namespace

std::uint32_t crc32(const void* data, std::size_t length, std::uint32_t seed) {
    return ~update(~seed, nullptr, static_cast<const unsigned char*>(data), length);
}

std::uint32_t copy_crc32(void* destination, const void* source, std::size_t length, std::uint32_t seed) {
    return ~update(~seed, static_cast<unsigned char*>(destination), static_cast<const unsigned char*>(source),
                   length);
}

std::uint32_t crc32_by_table(const void* data, std::size_t length, std::uint32_t seed) {
    return ~update_by_table<kPolynomial>(~seed, static_cast<const unsigned char*>(data), length);
}

}  // namespace swapper
