#include "packing.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "codec_tiles.h"
#include "crc32c.h"
#include "crew.h"

namespace swapper {
namespace {

using codec::Byte;
using codec::load16;
using codec::load32;
using codec::store16;
using codec::store32;

constexpr std::size_t kNumel = kPackedBlockNumel;
constexpr std::size_t kBlockBytes = 4 * kNumel;
constexpr std::size_t kLowBytes = 2 * kNumel;
constexpr std::size_t kPlaneBytes = kNumel / 8;
// Pieces begin at multiples of the first, and chunks end at multiples of the second: as all blocks that are
// packed do, so that no entry can be another without another length.
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kPackedAlignment = 32;

constexpr unsigned kBitsMax = 8;
constexpr unsigned kRaw = 9;
constexpr unsigned kBitsMask = 15;
constexpr unsigned kHasSigns = 16;
constexpr unsigned kHasZeros = 32;

using Block = std::array<Byte, kBlockBytes>;
using End = std::array<std::uint64_t, 2>;
static_assert(sizeof(End) == kPackedEndBytes);

constexpr std::size_t aligned(std::size_t bytes, std::size_t alignment = kAlignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

constexpr std::size_t blocks_of(std::size_t numel) {
    return numel / kNumel + (numel % kNumel != 0 ? 1 : 0);
}

constexpr std::size_t bytes_of_bits(unsigned bits) {
    return kLowBytes + kNumel + kPlaneBytes * (bits - 1);
}

// How a block is packed: its entry.
struct Form {
    unsigned base;
    unsigned form;

    unsigned bits() const { return form & kBitsMask; }
};

// What the values of a block have in common: all bits that any of them has; the largest exponent; and the
// smallest but 0, less 1, or 255 if there is none.
struct Summary {
    std::uint32_t bits;
    unsigned largest;
    unsigned below_smallest;
    bool has_zeros;
};

Form form_of(const Summary& found) {
    if (found.bits == 0) return {0, 0};
    const unsigned signs = found.bits >> 31;
    unsigned base = found.has_zeros ? found.below_smallest : found.below_smallest + 1;
    if (found.largest == 0) base = 0;
    unsigned bits = signs;
    for (unsigned range = found.largest - base; range != 0; range >>= 1) ++bits;
    bits = std::max(bits, 1U);
    if (bits > kBitsMax) return {0, kRaw};
    return {base, bits | (signs != 0 ? kHasSigns : 0) | (found.has_zeros ? kHasZeros : 0)};
}

// --- One block
// -------------------------------------------------------------------------------------------------

struct Baseline {
    static Summary summarize(const Byte* values) {
        Summary found{0, 0, 255, false};
        unsigned smallest = 255;
        for (std::size_t i = 0; i < kNumel; ++i) {
            const std::uint32_t value = load32(values, i);
            const unsigned exponent = value >> 23 & 255;
            found.bits |= value;
            found.largest = std::max(found.largest, exponent);
            smallest = std::min(smallest, exponent);
            found.below_smallest = std::min(found.below_smallest, (exponent - 1) & 255);
        }
        found.has_zeros = smallest == 0;
        return found;
    }

    static void pack(const Byte* values, Byte* data, const Form& form) {
        const bool has_signs = (form.form & kHasSigns) != 0;
        std::memset(data + kLowBytes + kNumel, 0, kPlaneBytes * (form.bits() - 1));
        for (std::size_t i = 0; i < kNumel; ++i) {
            const std::uint32_t value = load32(values, i);
            const unsigned exponent = value >> 23 & 255;
            unsigned code = exponent > form.base ? exponent - form.base : 0;
            if (has_signs) code = code << 1 | value >> 31;
            store16(data, i, value);
            data[kLowBytes + i] = static_cast<Byte>((value >> 16 & 127) | (code & 1) << 7);
            Byte* plane = data + kLowBytes + kNumel + i / 8;
            for (unsigned bit = 1; bit < form.bits(); ++bit, plane += kPlaneBytes) {
                *plane = static_cast<Byte>(*plane | (code >> bit & 1) << i % 8);
            }
        }
    }

    static void unpack(const Byte* data, Byte* values, const Form& form) {
        const bool has_signs = (form.form & kHasSigns) != 0;
        const bool has_zeros = (form.form & kHasZeros) != 0;
        for (std::size_t i = 0; i < kNumel; ++i) {
            const unsigned middle = data[kLowBytes + i];
            unsigned code = middle >> 7;
            const Byte* plane = data + kLowBytes + kNumel + i / 8;
            for (unsigned bit = 1; bit < form.bits(); ++bit, plane += kPlaneBytes) {
                code |= (*plane >> i % 8 & 1U) << bit;
            }
            const unsigned sign = has_signs ? code & 1 : 0;
            if (has_signs) code >>= 1;
            const unsigned exponent = has_zeros && code == 0 ? 0 : (code + form.base) & 255;
            store32(values, i, sign << 31 | exponent << 23 | (middle & 127) << 16 | load16(data, i));
        }
    }
};

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))

struct Avx2 {
    AVX2 static __m256i load(const Byte* data) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
    }
    AVX2 static void store(Byte* data, __m256i value) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), value);
    }
    // The bytes, or halves, of two vectors in order, after an instruction that takes them lane by lane.
    AVX2 static __m256i in_order(__m256i packed) { return _mm256_permute4x64_epi64(packed, 0xD8); }

    // The first or second 16 bytes, as halves.
    AVX2 static __m256i widened(__m256i bytes, int part) {
        return _mm256_cvtepu8_epi16(part == 0 ? _mm256_castsi256_si128(bytes)
                                              : _mm256_extracti128_si256(bytes, 1));
    }

    AVX2 static Summary summarize(const Byte* values) {
        const __m256i byte = _mm256_set1_epi32(255);
        const __m256i one = _mm256_set1_epi32(1);
        __m256i bits = _mm256_setzero_si256();
        __m256i largest = _mm256_setzero_si256();
        __m256i smallest = byte;
        __m256i below = _mm256_set1_epi32(-1);
        for (std::size_t i = 0; i < kBlockBytes; i += 32) {
            const __m256i value = load(values + i);
            const __m256i exponent = _mm256_and_si256(_mm256_srli_epi32(value, 23), byte);
            bits = _mm256_or_si256(bits, value);
            largest = _mm256_max_epu32(largest, exponent);
            smallest = _mm256_min_epu32(smallest, exponent);
            below = _mm256_min_epu32(below, _mm256_sub_epi32(exponent, one));
        }
        alignas(32) std::array<std::uint32_t, 8> all_bits;
        alignas(32) std::array<std::uint32_t, 8> all_largest;
        alignas(32) std::array<std::uint32_t, 8> all_smallest;
        alignas(32) std::array<std::uint32_t, 8> all_below;
        std::memcpy(all_bits.data(), &bits, 32);
        std::memcpy(all_largest.data(), &largest, 32);
        std::memcpy(all_smallest.data(), &smallest, 32);
        std::memcpy(all_below.data(), &below, 32);
        Summary found{0, 0, 255, false};
        for (std::size_t i = 0; i < 8; ++i) {
            found.bits |= all_bits[i];
            found.largest = std::max(found.largest, static_cast<unsigned>(all_largest[i]));
            found.below_smallest = std::min(found.below_smallest, static_cast<unsigned>(all_below[i]));
            found.has_zeros |= all_smallest[i] == 0;
        }
        return found;
    }

    AVX2 static void pack(const Byte* values, Byte* data, const Form& form) {
        const __m256i half = _mm256_set1_epi32(0xFFFF);
        const __m256i mantissa = _mm256_set1_epi16(127);
        const __m256i byte = _mm256_set1_epi16(255);
        const __m256i base = _mm256_set1_epi8(static_cast<char>(form.base));
        const __m256i top = _mm256_set1_epi8(static_cast<char>(128));
        const bool has_signs = (form.form & kHasSigns) != 0;
        for (std::size_t i = 0; i < kNumel; i += 32) {
            const Byte* from = values + 4 * i;
            const __m256i a = load(from);
            const __m256i b = load(from + 32);
            const __m256i c = load(from + 64);
            const __m256i d = load(from + 96);
            store(data + 2 * i,
                  in_order(_mm256_packus_epi32(_mm256_and_si256(a, half), _mm256_and_si256(b, half))));
            store(data + 2 * i + 32,
                  in_order(_mm256_packus_epi32(_mm256_and_si256(c, half), _mm256_and_si256(d, half))));
            // Sign, exponent and 7 bits of each value.
            const __m256i high =
                in_order(_mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)));
            const __m256i next =
                in_order(_mm256_packus_epi32(_mm256_srli_epi32(c, 16), _mm256_srli_epi32(d, 16)));
            const __m256i middle = in_order(
                _mm256_packus_epi16(_mm256_and_si256(high, mantissa), _mm256_and_si256(next, mantissa)));
            const __m256i exponent =
                in_order(_mm256_packus_epi16(_mm256_and_si256(_mm256_srli_epi16(high, 7), byte),
                                             _mm256_and_si256(_mm256_srli_epi16(next, 7), byte)));
            __m256i code = _mm256_subs_epu8(exponent, base);
            if (has_signs) {
                const __m256i sign =
                    in_order(_mm256_packus_epi16(_mm256_srli_epi16(high, 15), _mm256_srli_epi16(next, 15)));
                code = _mm256_or_si256(_mm256_add_epi8(code, code), sign);
            }
            store(data + kLowBytes + i,
                  _mm256_or_si256(middle, _mm256_and_si256(_mm256_slli_epi16(code, 7), top)));
            Byte* plane = data + kLowBytes + kNumel + i / 8;
            for (unsigned bit = 1; bit < form.bits(); ++bit, plane += kPlaneBytes) {
                const __m256i moved = _mm256_sll_epi16(code, _mm_cvtsi32_si128(static_cast<int>(7 - bit)));
                store32(plane, 0, static_cast<std::uint32_t>(_mm256_movemask_epi8(moved)));
            }
        }
    }

    AVX2 static void unpack(const Byte* data, Byte* values, const Form& form) {
        const __m256i byte_of_bit = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                                     2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
        const __m256i bit_of_byte = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ULL));
        const __m256i one = _mm256_set1_epi8(1);
        const __m256i mantissa = _mm256_set1_epi8(127);
        const __m256i base = _mm256_set1_epi8(static_cast<char>(form.base));
        const __m256i zero = _mm256_setzero_si256();
        const bool has_signs = (form.form & kHasSigns) != 0;
        const bool has_zeros = (form.form & kHasZeros) != 0;
        for (std::size_t i = 0; i < kNumel; i += 32) {
            const __m256i middle = load(data + kLowBytes + i);
            __m256i code = _mm256_and_si256(_mm256_srli_epi16(middle, 7), one);
            const Byte* plane = data + kLowBytes + kNumel + i / 8;
            for (unsigned bit = 1; bit < form.bits(); ++bit, plane += kPlaneBytes) {
                const __m256i bits = _mm256_set1_epi32(static_cast<int>(load32(plane, 0)));
                const __m256i mine = _mm256_and_si256(_mm256_shuffle_epi8(bits, byte_of_bit), bit_of_byte);
                const __m256i is_set = _mm256_cmpeq_epi8(mine, bit_of_byte);
                code = _mm256_or_si256(
                    code, _mm256_and_si256(is_set, _mm256_set1_epi8(static_cast<char>(1U << bit))));
            }
            __m256i sign = zero;
            if (has_signs) {
                sign = _mm256_and_si256(code, one);
                code = _mm256_and_si256(_mm256_srli_epi16(code, 1), mantissa);
            }
            __m256i exponent = _mm256_add_epi8(code, base);
            if (has_zeros) exponent = _mm256_andnot_si256(_mm256_cmpeq_epi8(code, zero), exponent);
            const __m256i seven = _mm256_and_si256(middle, mantissa);
            for (int part = 0; part < 2; ++part) {
                const __m256i signed_exponent = _mm256_or_si256(_mm256_slli_epi16(widened(exponent, part), 7),
                                                                _mm256_slli_epi16(widened(sign, part), 15));
                const __m256i high = _mm256_or_si256(widened(seven, part), signed_exponent);
                const std::size_t first = i + 16 * static_cast<std::size_t>(part);
                const __m256i low = load(data + 2 * first);
                const __m256i even = _mm256_unpacklo_epi16(low, high);
                const __m256i odd = _mm256_unpackhi_epi16(low, high);
                store(values + 4 * first, _mm256_permute2x128_si256(even, odd, 0x20));
                store(values + 4 * first + 32, _mm256_permute2x128_si256(even, odd, 0x31));
            }
        }
    }
};
#undef AVX2
#endif

struct Kernels {
    decltype(&Baseline::summarize) summarize;
    decltype(&Baseline::pack) pack;
    decltype(&Baseline::unpack) unpack;
};

template <class Variant>
constexpr Kernels kernels_of() {
    return {Variant::summarize, Variant::pack, Variant::unpack};
}

Kernels kernels(InstructionSet set) {
#if defined(__x86_64__)
    if (set != InstructionSet::kBaseline) return kernels_of<Avx2>();
#endif
    static_cast<void>(set);
    return kernels_of<Baseline>();
}

// --- Runs of blocks
// --------------------------------------------------------------------------------------------

Form form_at(const Byte* entry) {
    return {entry[0], entry[1]};
}

// The bytes of a block of `numel` elements by its entry.
std::size_t block_bytes(const Byte* entry, std::size_t numel) {
    const Form form = form_at(entry);
    if (form.base == 0 && form.form == 0) return 0;
    if (form.base == 0 && form.form == kRaw) return 4 * numel;
    const bool is_known = (form.form & ~(kBitsMask | kHasSigns | kHasZeros)) == 0;
    if (!is_known || numel != kNumel || form.bits() == 0 || form.bits() > kBitsMax) {
        throw std::invalid_argument("a packed block has base " + std::to_string(form.base) + " and form " +
                                    std::to_string(form.form) + ", which is none");
    }
    return bytes_of_bits(form.bits());
}

// Up to 256 blocks of a tensor.
struct Chunk {
    Byte* table;
    Byte* values;
    std::size_t numel;
    std::size_t data_bytes;  // when it is packed
};

std::size_t chunk_bytes(const Byte* table, std::size_t numel) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < numel; i += kNumel, table += kPackedEntryBytes) {
        bytes += block_bytes(table, std::min(kNumel, numel - i));
    }
    return aligned(bytes, kPackedAlignment);
}

// Packs a chunk to `data`, which may be where its values are, or before. Returns its bytes.
std::size_t pack_chunk(const Chunk& chunk, Byte* data, const Kernels& kernel) {
    Block packed;
    Byte* out = data;
    Byte* entry = chunk.table;
    const Byte* values = chunk.values;
    for (std::size_t left = chunk.numel; left != 0; entry += kPackedEntryBytes) {
        const std::size_t numel = std::min(kNumel, left);
        Form form{0, kRaw};
        if (numel == kNumel) form = form_of(kernel.summarize(values));
        entry[0] = static_cast<Byte>(form.base);
        entry[1] = static_cast<Byte>(form.form);
        if (form.form == kRaw) {
            std::memmove(out, values, 4 * numel);
            out += 4 * numel;
        } else if (form.form != 0) {
            // Not at once to where it goes: its own values are there.
            kernel.pack(values, packed.data(), form);
            std::memcpy(out, packed.data(), bytes_of_bits(form.bits()));
            out += bytes_of_bits(form.bits());
        }
        values += 4 * numel;
        left -= numel;
    }
    const std::size_t bytes = aligned(static_cast<std::size_t>(out - data), kPackedAlignment);
    std::memset(out, 0, static_cast<std::size_t>(data + bytes - out));
    return bytes;
}

// The inverse, from the last block to the first: the values may be where the data is, or behind.
void unpack_chunk(const Chunk& chunk, const Byte* data, const Kernels& kernel) {
    Block packed;
    const std::size_t blocks = blocks_of(chunk.numel);
    std::size_t end = 0;
    for (std::size_t i = 0; i < blocks; ++i) {
        end += block_bytes(chunk.table + kPackedEntryBytes * i, std::min(kNumel, chunk.numel - i * kNumel));
    }
    for (std::size_t i = blocks; i-- != 0;) {
        const std::size_t numel = std::min(kNumel, chunk.numel - i * kNumel);
        const Byte* entry = chunk.table + kPackedEntryBytes * i;
        const Form form = form_at(entry);
        const std::size_t bytes = block_bytes(entry, numel);
        Byte* values = chunk.values + kBlockBytes * i;
        end -= bytes;
        if (form.form == 0) {
            std::memset(values, 0, 4 * numel);
        } else if (form.form == kRaw) {
            std::memmove(values, data + end, 4 * numel);
        } else {
            std::memcpy(packed.data(), data + end, bytes);
            kernel.unpack(packed.data(), values, form);
        }
    }
}

// --- Records
// ---------------------------------------------------------------------------------------------------

Byte* bytes_at(const PackedRecord& record, std::size_t offset) {
    return static_cast<Byte*>(record.data) + offset;
}

void check(bool is_right) {
    if (!is_right) throw std::invalid_argument("the pieces of a packed record are not within it, in order");
}

// True if `bytes` at `offset` are within the first `length`.
constexpr bool fits(std::size_t offset, std::size_t bytes, std::size_t length) {
    return offset <= length && bytes <= length - offset;
}

// The chunks of a record, in order. Throws std::invalid_argument where it is not as described.
std::vector<Chunk> chunks_of(const PackedRecord& record) {
    std::vector<Chunk> chunks;
    const std::size_t length = record.length_bytes;
    check(!record.pieces.empty() && fits(record.end_offset, kPackedEndBytes, record.pieces[0].values_offset));
    std::size_t cursor = record.pieces[0].values_offset;
    for (const PackedPiece& piece : record.pieces) {
        const std::size_t table_bytes = kPackedEntryBytes * blocks_of(piece.numel);
        check(piece.values_offset % kAlignment == 0 && piece.values_offset == cursor);
        check(piece.numel <= length / 4 && fits(piece.values_offset, aligned(4 * piece.numel), length));
        check(fits(piece.table_offset, table_bytes, record.pieces[0].values_offset));
        cursor += aligned(4 * piece.numel);
        for (std::size_t i = 0; i < piece.numel; i += kPackedChunkNumel) {
            chunks.push_back({bytes_at(record, piece.table_offset) + kPackedEntryBytes * (i / kNumel),
                              bytes_at(record, piece.values_offset) + 4 * i,
                              std::min(kPackedChunkNumel, piece.numel - i), 0});
        }
    }
    check(record.tail_offset == cursor && fits(cursor, record.tail_bytes, length));
    return chunks;
}

// Chunks `begin` to `end`, which one thread packs or unpacks.
struct Run {
    std::size_t begin;
    std::size_t end;
    std::size_t data_bytes;
};

std::vector<Run> runs_of(std::size_t chunks, unsigned threads) {
    const std::size_t count = std::clamp<std::size_t>(chunks / 2, 1, std::max(threads, 1U));
    std::vector<Run> runs;
    for (std::size_t i = 0; i < count; ++i) runs.push_back({chunks * i / count, chunks * (i + 1) / count, 0});
    return runs;
}

void in_parallel(std::size_t count, const std::function<void(std::size_t)>& work) {
    std::atomic<std::size_t> next{0};
    run_on_crew(count, [&] {
        for (std::size_t i = next++; i < count; i = next++) work(i);
    });
}

// The offsets of all pieces, the tail and its end, for chunks whose packed lengths are known.
std::vector<std::size_t> offsets_of(const PackedRecord& record, const std::vector<Chunk>& chunks) {
    std::vector<std::size_t> offsets;
    std::size_t cursor = record.pieces[0].values_offset;
    auto chunk = chunks.begin();
    for (const PackedPiece& piece : record.pieces) {
        offsets.push_back(cursor);
        for (std::size_t i = 0; i < piece.numel; i += kPackedChunkNumel) cursor += (chunk++)->data_bytes;
    }
    offsets.push_back(cursor);
    offsets.push_back(cursor + record.tail_bytes);
    return offsets;
}

// What says of a record that its values end at `stop`, and are packed as its tables say.
End end_of(const PackedRecord& record, std::size_t stop) {
    std::uint32_t crc = 0;
    for (const PackedPiece& piece : record.pieces) {
        crc = crc32c(bytes_at(record, piece.table_offset), kPackedEntryBytes * blocks_of(piece.numel), crc);
    }
    return {stop, crc};
}

// The chunks of a packed record, with their packed lengths; and their offsets. Throws as packed_offsets().
std::vector<std::size_t> located(const PackedRecord& record, std::vector<Chunk>& chunks) {
    chunks = chunks_of(record);
    for (Chunk& chunk : chunks) chunk.data_bytes = chunk_bytes(chunk.table, chunk.numel);
    std::vector<std::size_t> offsets = offsets_of(record, chunks);
    End found;
    std::memcpy(found.data(), bytes_at(record, record.end_offset), kPackedEndBytes);
    const End wanted = end_of(record, offsets[record.pieces.size()]);
    if (found != wanted) {
        throw std::invalid_argument("packed values end at " + std::to_string(wanted[0]) + ", with checksum " +
                                    std::to_string(wanted[1]) + ", by its tables, and it says " +
                                    std::to_string(found[0]) + " and " + std::to_string(found[1]));
    }
    return offsets;
}

}  // namespace

std::vector<std::size_t> pack_record(const PackedRecord& record, unsigned threads, InstructionSet set) {
    std::vector<Chunk> chunks = chunks_of(record);
    std::vector<Run> runs = runs_of(chunks.size(), threads);
    const Kernels kernel = kernels(set);
    in_parallel(runs.size(), [&](std::size_t number) {
        Run& run = runs[number];
        if (run.begin == run.end) return;
        for (std::size_t i = run.begin; i < run.end; ++i) {
            chunks[i].data_bytes = pack_chunk(chunks[i], chunks[run.begin].values + run.data_bytes, kernel);
            run.data_bytes += chunks[i].data_bytes;
        }
    });
    Byte* end = bytes_at(record, record.pieces[0].values_offset);
    for (const Run& run : runs) {
        if (run.begin != run.end) std::memmove(end, chunks[run.begin].values, run.data_bytes);
        end += run.data_bytes;
    }
    std::memmove(end, bytes_at(record, record.tail_offset), record.tail_bytes);
    std::vector<std::size_t> offsets = offsets_of(record, chunks);
    const End stop = end_of(record, offsets[record.pieces.size()]);
    std::memcpy(bytes_at(record, record.end_offset), stop.data(), kPackedEndBytes);
    return offsets;
}

std::vector<std::size_t> packed_offsets(const PackedRecord& record) {
    std::vector<Chunk> chunks;
    return located(record, chunks);
}

void unpack_record(const PackedRecord& record, unsigned threads, InstructionSet set) {
    std::vector<Chunk> chunks;
    const std::vector<std::size_t> offsets = located(record, chunks);
    const std::size_t tail = offsets[offsets.size() - 2];
    std::memmove(bytes_at(record, record.tail_offset), bytes_at(record, tail), record.tail_bytes);
    std::vector<Run> runs = runs_of(chunks.size(), threads);
    std::size_t end = tail;
    for (std::size_t number = runs.size(); number-- != 0;) {
        Run& run = runs[number];
        for (std::size_t i = run.begin; i < run.end; ++i) run.data_bytes += chunks[i].data_bytes;
        end -= run.data_bytes;
        if (run.begin != run.end)
            std::memmove(chunks[run.begin].values, bytes_at(record, end), run.data_bytes);
    }
    const Kernels kernel = kernels(set);
    in_parallel(runs.size(), [&](std::size_t number) {
        const Run& run = runs[number];
        std::size_t left = run.data_bytes;
        for (std::size_t i = run.end; i-- != run.begin;) {
            left -= chunks[i].data_bytes;
            unpack_chunk(chunks[i], chunks[run.begin].values + left, kernel);
        }
    });
    std::memset(bytes_at(record, record.end_offset), 0xFF, kPackedEndBytes);
}

std::size_t packed_bytes(const void* table, std::size_t numel) {
    const auto* entry = static_cast<const Byte*>(table);
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < numel; i += kPackedChunkNumel) {
        bytes +=
            chunk_bytes(entry + kPackedEntryBytes * (i / kNumel), std::min(kPackedChunkNumel, numel - i));
    }
    return bytes;
}

void unpack_values(const void* table, const void* data, std::size_t length_bytes, void* values,
                   std::size_t numel, unsigned threads, InstructionSet set) {
    std::vector<Chunk> chunks;
    std::vector<const Byte*> places;
    // Chunks have tables that may be written, as those of records are; here nobody does.
    auto* const entries = static_cast<Byte*>(const_cast<void*>(table));
    std::size_t cursor = 0;
    for (std::size_t i = 0; i < numel; i += kPackedChunkNumel) {
        Chunk chunk{entries + kPackedEntryBytes * (i / kNumel), static_cast<Byte*>(values) + 4 * i,
                    std::min(kPackedChunkNumel, numel - i), 0};
        chunk.data_bytes = chunk_bytes(chunk.table, chunk.numel);
        places.push_back(static_cast<const Byte*>(data) + cursor);
        cursor += chunk.data_bytes;
        chunks.push_back(chunk);
    }
    if (cursor != length_bytes) {
        throw std::invalid_argument("packed values take " + std::to_string(cursor) +
                                    " bytes by their table, not " + std::to_string(length_bytes));
    }
    const Kernels kernel = kernels(set);
    const std::size_t groups = std::clamp<std::size_t>(chunks.size() / 2, 1, std::max(threads, 1U));
    std::atomic<std::size_t> next{0};
    run_on_crew(groups, [&] {
        for (std::size_t i = next++; i < chunks.size(); i = next++)
            unpack_chunk(chunks[i], places[i], kernel);
    });
}

}  // namespace swapper
