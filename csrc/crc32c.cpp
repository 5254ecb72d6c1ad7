#include "crc32c.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <future>
#include <vector>

#include "crc_table.h"
#include "crew.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define CRC32C_TARGET __attribute__((target("sse4.2")))
#define CRC32C_FOLDS __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define CRC32C_TARGET
#endif

namespace swapper {
namespace {

// 0x1EDC6F41 with its bits reflected: the coefficient of x^0 is the highest bit, here and in every value
// below. A checksum is a polynomial modulo this one, and appending n bytes to what it covers multiplies
// it by x^(8n).
constexpr std::uint32_t kPolynomial = 0x82F63B78;
constexpr std::uint32_t kOne = 0x80000000;

constexpr std::uint32_t times_x(std::uint32_t a) {
    return (a & 1) != 0 ? (a >> 1) ^ kPolynomial : a >> 1;
}

constexpr std::uint32_t times(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
        if ((a & bit) != 0) product ^= b;
        b = times_x(b);
    }
    return product;
}

// x^exponent, by squaring.
constexpr std::uint32_t x_to(std::uint64_t exponent) {
    std::uint32_t power = times_x(kOne);
    std::uint32_t result = kOne;
    for (; exponent != 0; exponent >>= 1) {
        if ((exponent & 1) != 0) result = times(result, power);
        power = times(power, power);
    }
    return result;
}

constexpr std::uint32_t x_to_bytes(std::size_t length) {
    return x_to(8 * std::uint64_t{length});
}

// The functions named `update` take and return the register, which is the checksum's complement.

#if defined(CRC32C_TARGET)

#if defined(__x86_64__)
bool hardware_present() {
    return __builtin_cpu_supports("sse4.2") != 0;
}
CRC32C_TARGET inline std::uint32_t step_word(std::uint32_t crc, std::uint64_t word) {
    return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
CRC32C_TARGET inline std::uint32_t step_byte(std::uint32_t crc, unsigned char byte) {
    return _mm_crc32_u8(crc, byte);
}
#else
// Assembly, because <arm_acle.h> declares these only where the whole file is compiled for a processor
// that has them (older clang).
bool hardware_present() {
    constexpr unsigned long kCrc32 = 1UL << 7;  // HWCAP_CRC32 of <asm/hwcap.h>
    return (getauxval(AT_HWCAP) & kCrc32) != 0;
}
inline std::uint32_t step_word(std::uint32_t crc, std::uint64_t word) {
    asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}
inline std::uint32_t step_byte(std::uint32_t crc, unsigned char byte) {
    asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(static_cast<std::uint32_t>(byte)));
    return crc;
}
#endif

// Multiplies by x^(8 * length) with four look-ups: a checksum is the sum of its four bytes.
template <std::size_t length>
class Shift {
  public:
    static std::uint32_t apply(std::uint32_t crc) {
        return kTables[0][crc & 0xFF] ^ kTables[1][(crc >> 8) & 0xFF] ^ kTables[2][(crc >> 16) & 0xFF] ^
               kTables[3][crc >> 24];
    }

  private:
    using Tables = std::array<std::array<std::uint32_t, 256>, 4>;
    static constexpr Tables make() {
        Tables tables{};
        const std::uint32_t power = x_to_bytes(length);
        for (std::uint32_t k = 0; k < 4; ++k) {
            for (std::uint32_t v = 0; v < 256; ++v) tables[k][v] = times(v << (8 * k), power);
        }
        return tables;
    }
    static constexpr Tables kTables = make();
};

// The instruction takes three cycles, and a new one starts every cycle: three lanes side by side, each
// `lane` bytes, then joined. A lane that starts from 0 is joined by adding it to what came before,
// shifted past it.
template <std::size_t lane>
CRC32C_TARGET inline std::uint32_t update_lanes(std::uint32_t crc, const unsigned char* data) {
    static_assert(lane % 8 == 0);
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < lane; i += 8) {
        crc = step_word(crc, load_word(data + i));
        second = step_word(second, load_word(data + lane + i));
        third = step_word(third, load_word(data + 2 * lane + i));
    }
    return Shift<lane>::apply(Shift<lane>::apply(crc) ^ second) ^ third;
}

CRC32C_TARGET std::uint32_t update_by_hardware(std::uint32_t crc, const unsigned char* data,
                                               std::size_t length) {
    constexpr std::size_t kLongLane = 4096;
    constexpr std::size_t kShortLane = 256;
    for (; length >= 3 * kLongLane; data += 3 * kLongLane, length -= 3 * kLongLane) {
        crc = update_lanes<kLongLane>(crc, data);
    }
    for (; length >= 3 * kShortLane; data += 3 * kShortLane, length -= 3 * kShortLane) {
        crc = update_lanes<kShortLane>(crc, data);
    }
    for (; length >= 8; data += 8, length -= 8) crc = step_word(crc, load_word(data));
    for (; length != 0; ++data, --length) crc = step_byte(crc, *data);
    return crc;
}

std::uint32_t update_unfolded(std::uint32_t crc, const unsigned char* data, std::size_t length) {
    static const bool present = hardware_present();
    return present ? update_by_hardware(crc, data, length) : update_by_table<kPolynomial>(crc, data, length);
}

#if defined(CRC32C_FOLDS)

// Folding (Gopal et al., Intel 2009): 128 bits are a polynomial, the lowest bit that of x^127. Its halves are
// multiplied by what they are worth `bits` later, modulo P, and added to what is there: the checksum stays.
// The product of two reflected factors is reflected with one bit less, hence the - 1.
constexpr std::uint64_t fold_factor(std::uint64_t exponent) {
    return static_cast<std::uint64_t>(x_to(exponent - 1)) << 32;
}

template <std::uint64_t bits>
CRC32C_FOLDS inline __m512i folded(__m512i sum, __m512i next) {
    constexpr auto kLow = static_cast<long long>(fold_factor(bits + 64));
    constexpr auto kHigh = static_cast<long long>(fold_factor(bits));
    const __m512i factors = _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
    const __m512i low = _mm512_clmulepi64_epi128(sum, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(sum, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // exclusive or of all three
}

CRC32C_FOLDS inline __m512i load_512(const unsigned char* data) {
    return _mm512_loadu_si512(data);
}

constexpr std::size_t kFoldedMin = 512;

// At least kFoldedMin bytes.
CRC32C_FOLDS std::uint32_t update_folded(std::uint32_t crc, const unsigned char* data, std::size_t length) {
    // Four sums side by side, since a multiplication takes some cycles.
    __m512i a =
        _mm512_xor_si512(load_512(data), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
    __m512i b = load_512(data + 64);
    __m512i c = load_512(data + 128);
    __m512i d = load_512(data + 192);
    for (data += 256, length -= 256; length >= 256; data += 256, length -= 256) {
        a = folded<2048>(a, load_512(data));
        b = folded<2048>(b, load_512(data + 64));
        c = folded<2048>(c, load_512(data + 128));
        d = folded<2048>(d, load_512(data + 192));
    }
    const __m512i sum = folded<512>(folded<512>(folded<512>(a, b), c), d);
    alignas(64) std::uint64_t words[8];
    _mm512_store_si512(words, sum);
    // What is left are 64 bytes with the same checksum.
    std::uint32_t rest = 0;
    for (const std::uint64_t word : words) rest = step_word(rest, word);
    return update_by_hardware(rest, data, length);
}

std::uint32_t update(std::uint32_t crc, const unsigned char* data, std::size_t length) {
    static const bool folds = hardware_present() && __builtin_cpu_supports("pclmul") &&
                              __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
    return folds && length >= kFoldedMin ? update_folded(crc, data, length)
                                         : update_unfolded(crc, data, length);
}

#else

std::uint32_t update(std::uint32_t crc, const unsigned char* data, std::size_t length) {
    return update_unfolded(crc, data, length);
}

#endif

#else

std::uint32_t update_unfolded(std::uint32_t crc, const unsigned char* data, std::size_t length) {
    return update_by_table<kPolynomial>(crc, data, length);
}

std::uint32_t update(std::uint32_t crc, const unsigned char* data, std::size_t length) {
    return update_by_table<kPolynomial>(crc, data, length);
}

#endif

// Starting a thread takes about as long as this many bytes.
constexpr std::size_t kLengthPerThreadMin = std::size_t{1} << 20;
// Waking one about as long as this many.
constexpr std::size_t kLengthPerCrewMin = std::size_t{1} << 18;

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t seed, unsigned threads) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    const std::size_t parts = std::min<std::size_t>(threads, length / kLengthPerThreadMin);
    if (parts <= 1) return ~update(~seed, bytes, length);

    // This thread takes the first part, with what is left over. async|deferred: where no thread is to be
    // had, get() does the part here.
    const std::size_t part = length / parts;
    const std::size_t first = length - part * (parts - 1);
    std::vector<std::future<std::uint32_t>> others;
    others.reserve(parts - 1);
    for (std::size_t offset = first; offset < length; offset += part) {
        others.push_back(std::async(std::launch::async | std::launch::deferred,
                                    [=] { return ~update(~std::uint32_t{0}, bytes + offset, part); }));
    }
    std::uint32_t crc = ~update(~seed, bytes, first);
    const std::uint32_t shift = crc32c_shift(part);
    for (auto& other : others) crc = crc32c_join(crc, other.get(), shift);
    return crc;
}

std::vector<std::uint32_t> crc32c_each(const std::vector<std::pair<const void*, std::size_t>>& runs,
                                       unsigned threads) {
    std::vector<std::uint32_t> sums(runs.size());
    std::size_t total = 0;
    for (const auto& run : runs) total += run.second;
    std::atomic<std::size_t> next{0};
    const std::size_t useful = std::min<std::size_t>({threads, runs.size(), total / kLengthPerCrewMin});
    run_on_crew(useful, [&] {
        for (;;) {
            const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
            if (i >= runs.size()) return;
            sums[i] = crc32c(runs[i].first, runs[i].second);
        }
    });
    return sums;
}

std::uint32_t crc32c_join(std::uint32_t crc_a, std::uint32_t crc_b, std::uint32_t shift_b) {
    return times(shift_b, crc_a) ^ crc_b;  // Their complements cancel out.
}

std::uint32_t crc32c_shift(std::size_t length) {
    return x_to_bytes(length);
}

std::uint32_t crc32c_unfolded(const void* data, std::size_t length, std::uint32_t seed) {
    return ~update_unfolded(~seed, static_cast<const unsigned char*>(data), length);
}

std::uint32_t crc32c_by_table(const void* data, std::size_t length, std::uint32_t seed) {
    return ~update_by_table<kPolynomial>(~seed, static_cast<const unsigned char*>(data), length);
}

}  // namespace swapper
