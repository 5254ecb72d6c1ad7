#include "bf16_packing.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "codec_tiles.h"
#include "crew.h"

namespace swapper {
namespace {

using codec::Byte;
using codec::load16;
using codec::load32;
using codec::store16;
using codec::store32;

constexpr std::size_t kNumel = kBf16ChunkNumel;
constexpr std::size_t kAlignment = 64;
constexpr std::uint64_t kMagic = 0x3631464250415753ULL;  // "SWAPBF16"
constexpr std::uint32_t kVersion = 1;

// Values that are found at once, and their codes of so many bits.
constexpr std::size_t kGroup = 32;
constexpr std::size_t kGroupBytes = kGroup / 8;
constexpr unsigned kShortBits = 2;
constexpr unsigned kLongBits = 3;
constexpr std::size_t kUsual = (1U << kShortBits) - 1;
constexpr std::size_t kRarer = (1U << kLongBits) - 1;

constexpr std::size_t aligned(std::size_t numel, std::size_t alignment) {
    return (numel + alignment - 1) / alignment * alignment;
}
constexpr std::size_t chunks_of(std::size_t numel) {
    return numel / kNumel + (numel % kNumel != 0 ? 1 : 0);
}
constexpr std::size_t plane_bytes(std::size_t numel) {
    return aligned(numel, kGroup) / 8;
}

// The entry of a chunk in the table.
struct Entry {
    std::array<Byte, kUsual> usual{};
    std::array<Byte, kRarer> rarer{};
    std::uint16_t escapes = 0;  // values whose exponent is not usual
    std::uint16_t others = 0;   // those whose exponent is not one of the rarer, either
    Byte is_plain = 0;
    Byte zero = 0;

    std::size_t data_bytes(std::size_t numel) const {
        if (is_plain != 0) return 2 * numel;
        return numel + kShortBits * plane_bytes(numel) + kLongBits * plane_bytes(escapes) + others;
    }
};
static_assert(sizeof(Entry) == kBf16EntryBytes);

Entry entry_at(const Byte* table, std::size_t number) {
    Entry entry;
    std::memcpy(&entry, table + kBf16EntryBytes * number, sizeof(Entry));
    return entry;
}

// Where what a chunk has begins in its data.
struct Parts {
    const Byte* low;    // sign and mantissa
    const Byte* codes;  // of 2 bits: one plane behind the other
    std::size_t code_plane;
    const Byte* escapes;  // of 3 bits
    std::size_t escape_plane;
    const Byte* others;

    Parts(const Byte* data, std::size_t numel, const Entry& entry)
        : low(data),
          codes(data + numel),
          code_plane(plane_bytes(numel)),
          escapes(codes + kShortBits * code_plane),
          escape_plane(plane_bytes(entry.escapes)),
          others(escapes + kLongBits * escape_plane) {}
};

// --- Packing
// -------------------------------------------------------------------------------------------------

using Counts = std::array<std::uint32_t, 256>;

Counts count(const Byte* exponents, std::size_t numel) {
    // Four, so that equal exponents in a row do not wait for one another.
    std::array<Counts, 4> counts{};
    for (std::size_t i = 0; i < numel; ++i) ++counts[i % 4][exponents[i]];
    for (std::size_t i = 0; i < 256; ++i) counts[0][i] += counts[1][i] + counts[2][i] + counts[3][i];
    return counts[0];
}

// The entry of a chunk, and the code of each exponent: 0 to 2, or 3 and the longer code in the bits above.
Entry entry_of(const Counts& counts, std::array<Byte, 256>& codes) {
    std::array<Byte, 256> ranked;
    for (std::size_t i = 0; i < 256; ++i) ranked[i] = static_cast<Byte>(i);
    std::partial_sort(ranked.begin(), ranked.begin() + kUsual + kRarer, ranked.end(),
                      [&](Byte a, Byte b) { return counts[a] != counts[b] ? counts[a] > counts[b] : a < b; });
    Entry entry;
    codes.fill(kUsual | kRarer << kShortBits);
    std::size_t escapes = 0;
    std::size_t others = 0;
    for (std::size_t i = 0; i < 256; ++i) {
        const Byte exponent = ranked[i];
        if (i < kUsual) {
            entry.usual[i] = exponent;
            codes[exponent] = static_cast<Byte>(i);
        } else {
            escapes += counts[exponent];
            if (i < kUsual + kRarer) {
                entry.rarer[i - kUsual] = exponent;
                codes[exponent] = static_cast<Byte>(kUsual | (i - kUsual) << kShortBits);
            } else {
                others += counts[exponent];
            }
        }
    }
    entry.escapes = static_cast<std::uint16_t>(escapes);
    entry.others = static_cast<std::uint16_t>(others);
    return entry;
}

// Bit `bit` of 8 codes, one of each byte, as one byte.
CODEC_INLINE Byte bits_of(const Byte* codes, unsigned bit) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, codes, 8);
    return static_cast<Byte>((eight >> bit & 0x0101010101010101ULL) * 0x0102040810204080ULL >> 56);
}

// Writes the bits of codes, of which there are zeros behind the last up to a whole group, plane by plane.
void write_codes(const Byte* codes, unsigned bits, std::size_t plane, Byte* planes) {
    for (std::size_t i = 0; i < plane; ++i) {
        for (unsigned bit = 0; bit < bits; ++bit) planes[plane * bit + i] = bits_of(codes + 8 * i, bit);
    }
}

// Packs a chunk to `data`, which has room for its values as they are.
Entry pack_chunk(const Byte* values, std::size_t numel, Byte* data) {
    using Codes = std::array<Byte, kNumel + kGroup>;
    Codes low;
    Codes exponents;
    for (std::size_t i = 0; i < numel; ++i) {
        const std::uint32_t value = load16(values, i);
        low[i] = static_cast<Byte>((value >> 8 & 128) | (value & 127));
        exponents[i] = static_cast<Byte>(value >> 7);
    }
    std::array<Byte, 256> codes;
    Entry entry = entry_of(count(exponents.data(), numel), codes);
    if (entry.data_bytes(numel) >= 2 * numel) {
        Entry plain;
        plain.is_plain = 1;
        std::memcpy(data, values, 2 * numel);
        return plain;
    }
    const Parts parts(data, numel, entry);
    Codes short_codes;
    const auto [usual, second, third] = entry.usual;
    for (std::size_t i = 0; i < numel; ++i) {
        const Byte exponent = exponents[i];
        Byte code = exponent == third ? 2 : 3;
        code = exponent == second ? 1 : code;
        short_codes[i] = exponent == usual ? 0 : code;
    }
    std::memset(short_codes.data() + numel, 0, kGroup);
    Byte* const planes = data + numel;
    write_codes(short_codes.data(), kShortBits, parts.code_plane, planes);
    Codes long_codes;
    Codes others;
    std::size_t escapes = 0;
    std::size_t other = 0;
    for (std::size_t i = 0; i < parts.code_plane / kGroupBytes; ++i) {
        std::uint32_t left = load32(planes, i) & load32(planes + parts.code_plane, i);
        for (; left != 0; left &= left - 1) {
            const Byte exponent = exponents[kGroup * i + static_cast<std::size_t>(__builtin_ctz(left))];
            const unsigned code = codes[exponent] >> kShortBits;
            long_codes[escapes++] = static_cast<Byte>(code);
            others[other] = exponent;  // and written over if it is none
            other += code == kRarer ? 1 : 0;
        }
    }
    std::memset(long_codes.data() + escapes, 0, kGroup);
    write_codes(long_codes.data(), kLongBits, parts.escape_plane, data + (parts.escapes - data));
    if (other != 0) std::memcpy(data + (parts.others - data), others.data(), other);
    std::memcpy(data, low.data(), numel);
    return entry;
}

// --- Unpacking one chunk
// -------------------------------------------------------------------------------------

// Exponents of the values of a chunk whose code is 3, in order; what is behind them may be read, and is
// anything.
using Escaped = std::array<Byte, kNumel + kGroup>;

struct Baseline {
    // Writes the exponents of all values whose code is 3 to `found`.
    static void unpack_escapes(const Parts& parts, const Entry& entry, Escaped& found) {
        const Byte* others = parts.others;
        for (std::size_t i = 0; i < entry.escapes; ++i) {
            unsigned code = 0;
            for (unsigned bit = 0; bit < kLongBits; ++bit) {
                code |= (parts.escapes[parts.escape_plane * bit + i / 8] >> i % 8 & 1U) << bit;
            }
            found[i] = code == kRarer ? *others++ : entry.rarer[code];
        }
    }

    // Writes `groups` groups of values, whose signs and mantissas are at `low`.
    static void unpack(const Byte* low, const Parts& parts, const Entry& entry, const Escaped& found,
                       Byte* values, std::size_t groups) {
        const Byte* next = found.data();
        for (std::size_t i = 0; i < groups * kGroup; ++i) {
            const unsigned code = (parts.codes[i / 8] >> i % 8 & 1U) |
                                  (parts.codes[parts.code_plane + i / 8] >> i % 8 & 1U) << 1;
            const std::uint32_t exponent = code == kUsual ? *next++ : entry.usual[code];
            store16(values, i, (low[i] & 128U) << 8 | exponent << 7 | (low[i] & 127U));
        }
    }
};

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,popcnt")))

// For each byte of bits the shuffle that puts the bytes of a list, one after another, to where its bits are
// set, and zeros elsewhere.
struct Shuffles {
    alignas(64) std::array<std::array<Byte, 8>, 256> of{};

    constexpr Shuffles() {
        for (unsigned bits = 0; bits < 256; ++bits) {
            Byte next = 0;
            for (unsigned i = 0; i < 8; ++i) of[bits][i] = (bits >> i & 1) != 0 ? next++ : Byte{128};
        }
    }
};
constexpr Shuffles kShuffles;

struct Avx2 {
    AVX2 static __m256i load(const Byte* data) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
    }
    AVX2 static void store(Byte* data, __m256i value) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), value);
    }

    // `value` in each byte whose bit of `bits` is set.
    AVX2 static __m256i spread(std::uint32_t bits, unsigned value) {
        const __m256i byte_of_bit = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                                     2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
        const __m256i bit_of_byte = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ULL));
        const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
        const __m256i mine = _mm256_and_si256(_mm256_shuffle_epi8(all, byte_of_bit), bit_of_byte);
        return _mm256_and_si256(_mm256_cmpeq_epi8(mine, bit_of_byte),
                                _mm256_set1_epi8(static_cast<char>(value)));
    }

    // The next 8 bytes of a list, where the bits are set.
    AVX2 static __m128i expand8(unsigned bits, const Byte* list) {
        const __m128i from = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(list));
        const __m128i shuffle = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kShuffles.of[bits].data()));
        return _mm_shuffle_epi8(from, shuffle);
    }

    // The next bytes of a list, one for each bit that is set, there, and zeros elsewhere. Reads 8 bytes more.
    AVX2 static __m256i expand(std::uint32_t bits, const Byte*& list) {
        const Byte* second = list + __builtin_popcount(bits & 0xFF);
        const Byte* third = list + __builtin_popcount(bits & 0xFFFF);
        const Byte* fourth = list + __builtin_popcount(bits & 0xFFFFFF);
        const __m128i front = _mm_unpacklo_epi64(expand8(bits & 255, list), expand8(bits >> 8 & 255, second));
        const __m128i back =
            _mm_unpacklo_epi64(expand8(bits >> 16 & 255, third), expand8(bits >> 24, fourth));
        list += __builtin_popcount(bits);
        return _mm256_set_m128i(back, front);
    }

    // The bytes of a table of 16 at both halves of a vector.
    template <std::size_t N>
    AVX2 static __m256i table_of(const std::array<Byte, N>& bytes) {
        alignas(16) std::array<Byte, 16> table{};
        std::copy(bytes.begin(), bytes.end(), table.begin());
        return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table.data())));
    }

    AVX2 static void unpack_escapes(const Parts& parts, const Entry& entry, Escaped& found) {
        Escaped others;
        if (entry.others != 0) std::memcpy(others.data(), parts.others, entry.others);
        const Byte* next = others.data();
        const __m256i rarer = table_of(entry.rarer);  // 0 for code 7
        for (std::size_t i = 0; i < entry.escapes; i += kGroup) {
            const std::uint32_t first = load32(parts.escapes, i / kGroup);
            const std::uint32_t second = load32(parts.escapes + parts.escape_plane, i / kGroup);
            const std::uint32_t third = load32(parts.escapes + 2 * parts.escape_plane, i / kGroup);
            const __m256i code =
                _mm256_or_si256(spread(first, 1), _mm256_or_si256(spread(second, 2), spread(third, 4)));
            __m256i exponent = _mm256_shuffle_epi8(rarer, code);
            const std::uint32_t unknown = first & second & third;
            if (unknown != 0) exponent = _mm256_or_si256(exponent, expand(unknown, next));
            store(found.data() + i, exponent);
        }
    }

    AVX2 static void unpack(const Byte* low, const Parts& parts, const Entry& entry, const Escaped& found,
                            Byte* values, std::size_t groups) {
        const Byte* next = found.data();
        const __m256i usual = table_of(entry.usual);  // 0 for code 3
        const __m256i top = _mm256_set1_epi8(static_cast<char>(128));
        for (std::size_t i = 0; i < groups; ++i) {
            const std::uint32_t first = load32(parts.codes, i);
            const std::uint32_t second = load32(parts.codes + parts.code_plane, i);
            const __m256i code = _mm256_or_si256(spread(first, 1), spread(second, 2));
            const __m256i exponent =
                _mm256_or_si256(_mm256_shuffle_epi8(usual, code), expand(first & second, next));
            const __m256i bits = load(low + kGroup * i);
            // The halves of each value: its mantissa below the lowest bit of its exponent; the rest below its
            // sign.
            const __m256i lower = _mm256_or_si256(_mm256_andnot_si256(top, bits),
                                                  _mm256_and_si256(top, _mm256_slli_epi16(exponent, 7)));
            const __m256i upper = _mm256_or_si256(_mm256_and_si256(top, bits),
                                                  _mm256_andnot_si256(top, _mm256_srli_epi16(exponent, 1)));
            const __m256i even = _mm256_unpacklo_epi8(lower, upper);
            const __m256i odd = _mm256_unpackhi_epi8(lower, upper);
            store(values + 2 * kGroup * i, _mm256_permute2x128_si256(even, odd, 0x20));
            store(values + 2 * kGroup * i + 32, _mm256_permute2x128_si256(even, odd, 0x31));
        }
    }
};
#undef AVX2
#endif

struct Kernels {
    decltype(&Baseline::unpack_escapes) unpack_escapes;
    decltype(&Baseline::unpack) unpack;
};

Kernels kernels(InstructionSet set) {
#if defined(__x86_64__)
    if (set != InstructionSet::kBaseline) return {Avx2::unpack_escapes, Avx2::unpack};
#endif
    static_cast<void>(set);
    return {Baseline::unpack_escapes, Baseline::unpack};
}

// A chunk that is packed, and where its values go.
struct Chunk {
    Entry entry;
    const Byte* data;
    std::size_t data_bytes;
    Byte* values;
    std::size_t numel;
};

void unpack_chunk(const Chunk& chunk, const Byte* data, const Kernels& kernel) {
    if (chunk.entry.is_plain != 0) {
        std::memmove(chunk.values, data, 2 * chunk.numel);
        return;
    }
    const Parts parts(data, chunk.numel, chunk.entry);
    Escaped escaped;
    kernel.unpack_escapes(parts, chunk.entry, escaped);
    if (chunk.numel == kNumel) {
        kernel.unpack(parts.low, parts, chunk.entry, escaped, chunk.values, kNumel / kGroup);
        return;
    }
    // The last one: groups of values are read and written as if there were more.
    std::array<Byte, kNumel> low;
    std::array<Byte, 2 * kNumel> values;
    const std::size_t groups = aligned(chunk.numel, kGroup) / kGroup;
    std::memcpy(low.data(), parts.low, chunk.numel);
    std::memset(low.data() + chunk.numel, 0, groups * kGroup - chunk.numel);
    kernel.unpack(low.data(), parts, chunk.entry, escaped, values.data(), groups);
    std::memcpy(chunk.values, values.data(), 2 * chunk.numel);
}

// --- Many chunks
// ---------------------------------------------------------------------------------------------

// Has `threads` threads, at most one for each 32 chunks, do `work` for each chunk from `begin` to `end`.
// Fewer are done before another thread is awake; and where other programs use the processors, each wait for
// one may be long.
void in_parallel(std::size_t begin, std::size_t end, unsigned threads,
                 const std::function<void(std::size_t)>& work) {
    const std::size_t most = std::clamp<std::size_t>((end - begin) / 32, 1, std::max(threads, 1U));
    std::atomic<std::size_t> next{begin};
    run_on_crew(most, [&] {
        for (std::size_t i = next++; i < end; i = next++) work(i);
    });
}

[[noreturn]] void refuse(const std::string& why) {
    throw std::invalid_argument("this is not what packing has made of bf16 values: " + why);
}

// The number of bits that are set, of words of all of which `planes` many have bits of the same values.
std::size_t count_all_set(const Byte* planes, std::size_t plane, unsigned count) {
    std::size_t found = 0;
    for (std::size_t i = 0; i < plane; i += kGroupBytes) {
        std::uint32_t all = load32(planes + i, 0);
        for (unsigned bit = 1; bit < count; ++bit) all &= load32(planes + plane * bit + i, 0);
        found += static_cast<std::size_t>(__builtin_popcount(all));
    }
    return found;
}

// Looks at what says how much of a chunk is read.
bool is_right(const Chunk& chunk) {
    if (chunk.entry.is_plain != 0) return true;
    const Parts parts(chunk.data, chunk.numel, chunk.entry);
    return count_all_set(parts.codes, parts.code_plane, kShortBits) == chunk.entry.escapes &&
           count_all_set(parts.escapes, parts.escape_plane, kLongBits) == chunk.entry.others;
}

// The chunks of what is packed. Throws std::invalid_argument where they are none; their data is not looked
// at.
std::vector<Chunk> read_table(const Byte* packed, std::size_t length_bytes, Byte* values, std::size_t numel) {
    const std::size_t count = chunks_of(numel);
    if (length_bytes < kBf16HeadBytes) refuse("it has only " + std::to_string(length_bytes) + " bytes");
    std::array<std::uint64_t, 3> said;
    std::memcpy(said.data(), packed, sizeof(said));
    if (said[0] != kMagic || load32(packed, 6) != kNumel || load32(packed, 7) != kVersion) {
        refuse("it does not begin as that does");
    }
    if (said[1] != numel || said[2] != length_bytes) {
        refuse("it says that it has " + std::to_string(said[1]) + " values in " + std::to_string(said[2]) +
               " bytes, and should have " + std::to_string(numel) + " in " + std::to_string(length_bytes));
    }
    if (count > (length_bytes - kBf16HeadBytes) / kBf16EntryBytes) refuse("it is shorter than its table");
    std::vector<Chunk> chunks;
    chunks.reserve(count);
    std::size_t cursor = kBf16HeadBytes + kBf16EntryBytes * count;
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t here = std::min(kNumel, numel - i * kNumel);
        const Entry entry = entry_at(packed + kBf16HeadBytes, i);
        const std::size_t bytes = entry.data_bytes(here);
        const bool is_plain = entry.is_plain != 0;
        const bool is_entry = entry.is_plain <= 1 && entry.zero == 0 && entry.others <= entry.escapes &&
                              entry.escapes <= here && (is_plain ? entry.escapes == 0 : bytes < 2 * here);
        if (!is_entry || bytes > length_bytes - cursor) {
            refuse("what its table says of values " + std::to_string(i * kNumel) + " to " +
                   std::to_string(i * kNumel + here) + " cannot be");
        }
        chunks.push_back({entry, packed + cursor, bytes, values + 2 * kNumel * i, here});
        cursor += bytes;
    }
    if (aligned(cursor, kAlignment) != length_bytes) {
        refuse("its table describes " + std::to_string(cursor) + " bytes, and it has " +
               std::to_string(length_bytes));
    }
    return chunks;
}

// Unpacks chunks to where some of them are still packed: those at once that are written before the first that
// is not read yet; where there is none, one, read to elsewhere first.
void unpack_over(const std::vector<Chunk>& chunks, unsigned threads, const Kernels& kernel) {
    std::array<Byte, 2 * kNumel> copy;
    const std::size_t count = chunks.size();
    for (std::size_t begin = 0; begin < count;) {
        std::size_t end = begin;
        while (end < count && chunks[end].values + 2 * chunks[end].numel <= chunks[begin].data) ++end;
        if (end == begin) {
            std::memcpy(copy.data(), chunks[begin].data, chunks[begin].data_bytes);
            unpack_chunk(chunks[begin], copy.data(), kernel);
            ++end;
        } else {
            in_parallel(begin, end, threads,
                        [&](std::size_t i) { unpack_chunk(chunks[i], chunks[i].data, kernel); });
        }
        begin = end;
    }
}

}  // namespace

std::size_t packed_bf16_bytes_most(std::size_t numel) {
    if (numel > std::numeric_limits<std::size_t>::max() / 8) throw std::length_error("too many values");
    return aligned(kBf16HeadBytes + kBf16EntryBytes * chunks_of(numel) + 2 * numel, kAlignment);
}

std::size_t pack_bf16(const void* values, std::size_t numel, void* packed, unsigned threads) {
    const std::size_t count = chunks_of(numel);
    auto* const out = static_cast<Byte*>(packed);
    const auto* const from = static_cast<const Byte*>(values);
    Byte* const table = out + kBf16HeadBytes;
    Byte* const data = table + kBf16EntryBytes * count;
    in_parallel(0, count, threads, [&](std::size_t i) {
        const std::size_t at = 2 * kNumel * i;
        const Entry entry = pack_chunk(from + at, std::min(kNumel, numel - i * kNumel), data + at);
        std::memcpy(table + kBf16EntryBytes * i, &entry, sizeof(Entry));
    });
    Byte* end = data;
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t bytes = entry_at(table, i).data_bytes(std::min(kNumel, numel - i * kNumel));
        std::memmove(end, data + 2 * kNumel * i, bytes);
        end += bytes;
    }
    const std::size_t length = aligned(static_cast<std::size_t>(end - out), kAlignment);
    std::memset(end, 0, static_cast<std::size_t>(out + length - end));
    const std::array<std::uint64_t, 3> head{kMagic, numel, length};
    std::memcpy(out, head.data(), sizeof(head));
    store32(out, 6, kNumel);
    store32(out, 7, kVersion);
    return length;
}

void unpack_bf16(const void* packed, std::size_t length_bytes, void* values, std::size_t numel,
                 unsigned threads, InstructionSet set) {
    const auto* const from = static_cast<const Byte*>(packed);
    auto* const to = static_cast<Byte*>(values);
    const std::vector<Chunk> chunks = read_table(from, length_bytes, to, numel);
    const std::less<const Byte*> before;
    const bool is_over = numel != 0 && before(from, to + 2 * numel) && before(to, from + length_bytes);
    for (std::size_t i = 0; is_over && i + 1 < chunks.size(); ++i) {
        if (before(chunks[i + 1].data, chunks[i + 1].values)) {
            throw std::invalid_argument("bf16 values would be written over what they are unpacked from");
        }
    }
    std::atomic<bool> all_right{true};
    in_parallel(0, chunks.size(), threads, [&](std::size_t i) {
        if (!is_right(chunks[i])) all_right = false;
    });
    if (!all_right) refuse("the codes of its exponents are not as many as its table says");
    const Kernels kernel = kernels(set);
    if (is_over) {
        unpack_over(chunks, threads, kernel);
        return;
    }
    in_parallel(0, chunks.size(), threads,
                [&](std::size_t i) { unpack_chunk(chunks[i], chunks[i].data, kernel); });
}

}  // namespace swapper
