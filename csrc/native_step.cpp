#include "native_step.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "bf16_codec.h"
#include "codec.h"
#include "crc32c.h"
#include "crew.h"
#include "int8_codec.h"
#include "step_kernels.h"
#include "vendor_sqrt.h"

namespace swapper {
namespace {

using codec::Byte;
using rounding::GroupBits;

// Threads take pieces of this many elements, a multiple of kTileNumel, and of 8 for the ties' bytes.
constexpr std::size_t kStepPieceNumel = std::size_t{1} << 14;
static_assert(kStepPieceNumel % kTileNumel == 0 && kStepPieceNumel <= codec::kPieceNumel);
static_assert(kTileNumel == kBlockNumel, "a tile has one scale");

// Waking a thread takes about as long as this many elements.
constexpr std::size_t kNumelPerThreadMin = std::size_t{1} << 15;

// What a tile needs is asked of memory this many elements before: of several arrays at once the processor
// does not see by itself what comes next, least of all where a page ends.
constexpr std::size_t kPrefetchNumel = 2 * kTileNumel;
constexpr std::size_t kCacheLineBytes = 64;

using Encoding = EncodedArray::Encoding;

inline std::size_t bytes_of(Encoding encoding) {
    return encoding == Encoding::kBf16 ? 2 : 1;
}

inline void prefetch(const void* array, std::size_t at, std::size_t element_bytes) {
    const Byte* const begin = static_cast<const Byte*>(array) + element_bytes * at;
    for (std::size_t i = 0; i < element_bytes * kTileNumel; i += kCacheLineBytes) {
        __builtin_prefetch(begin + i);
    }
}

struct Piece {
    std::size_t job;
    std::size_t begin;
    std::size_t numel;
    std::size_t ties_before;  // of the job
};

// What passes from each piece of a job to the next, in their order, so that it does not depend on threads.
struct Progress {
    std::atomic<std::size_t> turn{0};
    StepResult result;
};

void check_arrays(const StepJob& job) {
    std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;
    const auto add_bytes = [&](const void* begin, std::size_t length) {
        const auto address = reinterpret_cast<std::uintptr_t>(begin);
        if (begin == nullptr) throw std::invalid_argument("an array is missing");
        ranges.emplace_back(address, address + length);
    };
    const auto add = [&](const void* begin, std::size_t size) {
        if (reinterpret_cast<std::uintptr_t>(begin) % size != 0)
            throw std::invalid_argument("an array is not aligned");
        add_bytes(begin, size * job.numel);
    };
    if (job.param != nullptr) {
        add(job.param, sizeof(float));
    } else {
        add(job.bits, 2);
        add(job.low, 2);
    }
    add(job.gradient, job.is_half ? 2 : sizeof(float));
    for (std::size_t i = 0; i < job.arrays.size(); ++i) {
        const EncodedArray encoded = job.encoded.empty() ? EncodedArray{} : job.encoded[i];
        const bool is_encoded = encoded.encoding != Encoding::kNone;
        if (job.arrays[i] != nullptr || !is_encoded) add(job.arrays[i], sizeof(float));
        if (!is_encoded) continue;
        const bool is_used = encoded.encodes || job.program->uses(2 + i);
        if (job.arrays[i] == nullptr && is_used && !encoded.decodes)
            throw std::invalid_argument("an encoded array is used, and not decoded");
        add_bytes(encoded.data, bytes_of(encoded.encoding) * job.numel);
        if (encoded.encoding == Encoding::kBf16) continue;
        add_bytes(encoded.scales, sizeof(float) * blocks_of(job.numel));
        if (encoded.first % kBlockNumel != 0)
            throw std::invalid_argument("an encoded array does not begin with a block");
    }
    std::sort(ranges.begin(), ranges.end());
    for (std::size_t i = 1; i < ranges.size(); ++i) {
        if (ranges[i - 1] != ranges[i] && ranges[i - 1].second > ranges[i].first) {
            throw std::invalid_argument("two arrays of a segment overlap in memory");
        }
    }
}

class Run {
  public:
    Run(const std::vector<StepJob>& jobs, unsigned threads, InstructionSet set)
        : jobs_(jobs),
          kernels_(step_kernels(set)),
          bf16_(bf16_kernels(set)),
          int8_(int8_kernels(set)),
          progress_(jobs.size()) {
        std::size_t total = 0;
        for (std::size_t i = 0; i < jobs.size(); ++i) {
            const StepJob& job = jobs[i];
            if (job.program == nullptr || job.arrays.size() != job.program->arrays()) {
                throw std::invalid_argument("a segment does not have the arrays of its program");
            }
            if (!job.encoded.empty() && job.encoded.size() != job.arrays.size()) {
                throw std::invalid_argument("a segment does not say of each array whether it is encoded");
            }
            check_arrays(job);
            total += job.numel;
            for (std::size_t begin = 0; begin < job.numel; begin += kStepPieceNumel) {
                pieces_.push_back({i, begin, std::min(kStepPieceNumel, job.numel - begin), 0});
            }
        }
        threads_ = std::max<std::size_t>(1, std::min<std::size_t>(threads, total / kNumelPerThreadMin));
        if (pieces_.empty() || std::none_of(jobs.begin(), jobs.end(), joins)) {
            state_.store(State::kCounted, std::memory_order_relaxed);
        } else {
            counts_.resize(pieces_.size());
            sums_.resize(jobs.size());
        }
    }

    std::size_t threads() const { return threads_; }

    // On each thread. Returns when this one finds nothing left to do.
    void work() {
        const VendorOnOneThread alone;
        if (is_counted()) step_pieces();
    }

    // When all threads have returned.
    std::vector<StepResult> results() const {
        if (state_.load(std::memory_order_relaxed) == State::kDamaged) {
            throw std::invalid_argument("the low halves have " + std::to_string(sums_[damaged_]) +
                                        " ties, not " + std::to_string(jobs_[damaged_].tie_bits));
        }
        std::vector<StepResult> results;
        results.reserve(jobs_.size());
        for (const auto& each : progress_) results.push_back(each.result);
        return results;
    }

  private:
    enum class State { kCounting, kCounted, kDamaged };

    static bool joins(const StepJob& job) {
        return job.param == nullptr && (job.program->reads_param() || job.program->writes_param());
    }

    // Finds, together with the other threads, where the ties of each piece begin. False if a job is damaged:
    // then nothing is written. Returns when all is counted.
    bool is_counted() {
        while (state_.load(std::memory_order_acquire) == State::kCounting) {
            const std::size_t i = next_to_count_.fetch_add(1, std::memory_order_relaxed);
            if (i >= pieces_.size()) {
                std::this_thread::yield();  // Soon: the others count their last ones.
                continue;
            }
            const Piece& piece = pieces_[i];
            const StepJob& job = jobs_[piece.job];
            if (joins(job)) {
                counts_[i] =
                    kernels_.count_ties(static_cast<const Byte*>(job.low) + 2 * piece.begin, piece.numel);
            }
            if (counted_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces_.size()) sum_up();
        }
        return state_.load(std::memory_order_relaxed) == State::kCounted;
    }

    // By the thread that has counted the last piece.
    void sum_up() {
        for (std::size_t i = 0; i < pieces_.size(); ++i) {
            pieces_[i].ties_before = sums_[pieces_[i].job];
            sums_[pieces_[i].job] += counts_[i];
        }
        State state = State::kCounted;
        for (std::size_t i = 0; i < jobs_.size() && state == State::kCounted; ++i) {
            if (joins(jobs_[i]) && sums_[i] != jobs_[i].tie_bits) {
                state = State::kDamaged;
                damaged_ = i;
            }
        }
        state_.store(state, std::memory_order_release);
    }

    // Pieces begin in order: see pass_on().
    void step_pieces() {
        for (;;) {
            const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);
            if (i >= pieces_.size()) return;
            step(pieces_[i]);
        }
    }

    // What the tile at `at` of a job will read.
    static void prefetch_tile(const StepJob& job, std::size_t at, bool joined) {
        if (at + kTileNumel > job.numel) return;
        const StepProgram& program = *job.program;
        if (joined) {
            prefetch(job.bits, at, 2);
            prefetch(job.low, at, 2);
        } else if (job.param != nullptr) {
            prefetch(job.param, at, sizeof(float));
        }
        if (program.uses(1)) prefetch(job.gradient, at, job.is_half ? 2 : sizeof(float));
        for (std::size_t i = 0; i < job.arrays.size(); ++i) {
            if (job.arrays[i] != nullptr && program.uses(2 + i)) prefetch(job.arrays[i], at, sizeof(float));
        }
        for (const EncodedArray& encoded : job.encoded) {
            if (encoded.decodes) prefetch(encoded.data, at, bytes_of(encoded.encoding));
        }
    }

    // Of the tile at `at` of a job.
    void decode(const EncodedArray& encoded, std::size_t at, float* values, std::size_t numel) const {
        auto* const out = reinterpret_cast<Byte*>(values);
        const Byte* const data = static_cast<const Byte*>(encoded.data) + bytes_of(encoded.encoding) * at;
        if (encoded.encoding == Encoding::kBf16) {
            bf16_.decode(data, out, numel);
        } else {
            int8_.decode(data, scales_at(encoded, at), out, numel);
        }
    }

    void encode(const EncodedArray& encoded, std::size_t at, const float* values, std::size_t numel,
                GroupBits& bits) const {
        const auto* const in = reinterpret_cast<const Byte*>(values);
        Byte* const data = static_cast<Byte*>(encoded.data) + bytes_of(encoded.encoding) * at;
        if (encoded.encoding == Encoding::kBf16) {
            bf16_.encode(in, data, numel, encoded.first + at, encoded.key, bits);
        } else {
            int8_.encode(in, data, scales_at(encoded, at), numel, encoded.first + at, encoded.key, bits);
        }
    }

    static Byte* scales_at(const EncodedArray& encoded, std::size_t at) {
        return static_cast<Byte*>(encoded.scales) + sizeof(float) * (at / kBlockNumel);
    }

    void step(const Piece& piece) {
        const StepJob& job = jobs_[piece.job];
        const StepProgram& program = *job.program;
        const bool joined = joins(job);
        const bool splits = joined && program.writes_param();
        alignas(64) float tiles[kRegistersMax][kTileNumel];
        float* registers[kRegistersMax];
        for (std::size_t i = 0; i < program.registers(); ++i) registers[i] = tiles[i];
        codec::PieceTies ties;
        std::vector<GroupBits> bits_of(job.encoded.size());
        std::size_t tie = piece.ties_before;
        for (std::size_t done = 0; done < piece.numel; done += kTileNumel) {
            const std::size_t at = piece.begin + done;
            const std::size_t numel = std::min(kTileNumel, piece.numel - done);
            prefetch_tile(job, at + kPrefetchNumel, joined);
            Byte* const bits = joined ? static_cast<Byte*>(job.bits) + 2 * at : nullptr;
            Byte* const low = joined ? static_cast<Byte*>(job.low) + 2 * at : nullptr;
            if (joined) {
                tie = kernels_.join(bits, low, static_cast<const Byte*>(job.ties), tie,
                                    reinterpret_cast<Byte*>(tiles[0]), numel);
            } else if (job.param != nullptr) {
                registers[0] = job.param + at;
            }
            if (job.is_half && program.uses(1)) {
                kernels_.widen(static_cast<const Byte*>(job.gradient) + 2 * at, tiles[1], numel);
            } else if (!job.is_half) {
                // Only read: see StepProgram.
                registers[1] = const_cast<float*>(static_cast<const float*>(job.gradient)) + at;
            }
            for (std::size_t i = 0; i < job.arrays.size(); ++i) {
                registers[2 + i] = job.arrays[i] != nullptr ? job.arrays[i] + at : tiles[2 + i];
            }
            for (std::size_t i = 0; i < job.encoded.size(); ++i) {
                if (job.encoded[i].decodes) decode(job.encoded[i], at, registers[2 + i], numel);
            }
            kernels_.run(program.instructions().data(), program.instructions().size(), registers, numel);
            for (std::size_t i = 0; i < job.encoded.size(); ++i) {
                if (job.encoded[i].encodes) encode(job.encoded[i], at, registers[2 + i], numel, bits_of[i]);
            }
            if (splits) kernels_.split(reinterpret_cast<const Byte*>(tiles[0]), bits, low, numel, ties);
        }
        if (splits) {
            const auto* const begin = static_cast<const Byte*>(job.bits) + 2 * piece.begin;
            pass_on(piece, job, ties, crc32c(begin, 2 * piece.numel));
        }
    }

    // Appends to what the pieces before have. Waits for their threads: soon, since they took theirs earlier.
    void pass_on(const Piece& piece, const StepJob& job, const codec::PieceTies& ties, std::uint32_t crc) {
        Progress& progress = progress_[piece.job];
        while (progress.turn.load(std::memory_order_acquire) != piece.begin) std::this_thread::yield();
        ties.copy_to(static_cast<Byte*>(job.new_ties), progress.result.tie_bits);
        progress.result.tie_bits += ties.bits();
        static const std::uint32_t whole_shift = crc32c_shift(2 * kStepPieceNumel);
        const std::uint32_t shift =
            piece.numel == kStepPieceNumel ? whole_shift : crc32c_shift(2 * piece.numel);
        progress.result.crc = crc32c_join(progress.result.crc, crc, shift);
        progress.turn.store(piece.begin + piece.numel, std::memory_order_release);
    }

    const std::vector<StepJob>& jobs_;
    const StepKernels& kernels_;
    const Bf16Kernels bf16_;
    const Int8Kernels int8_;
    std::vector<Progress> progress_;
    std::vector<Piece> pieces_;
    std::size_t threads_ = 1;
    std::atomic<State> state_{State::kCounting};
    std::vector<std::size_t> counts_;  // of each piece
    std::vector<std::size_t> sums_;    // of each job
    std::size_t damaged_ = 0;          // the first job whose sum is wrong
    std::atomic<std::size_t> next_to_count_{0};
    std::atomic<std::size_t> counted_{0};
    std::atomic<std::size_t> next_{0};
};

bool is_fused(Opcode code) {
    return code == Opcode::kFusedAdam || code == Opcode::kFusedSgd || code == Opcode::kFusedAdagrad;
}

}  // namespace

StepProgram::StepProgram(std::vector<Instruction> instructions, std::size_t arrays, std::size_t registers)
    : instructions_(std::move(instructions)), arrays_(arrays), registers_(registers) {
    if (registers > kRegistersMax || arrays + 2 > registers)
        throw std::invalid_argument("too many registers");
    for (const Instruction& each : instructions_) {
        if (static_cast<std::size_t>(each.code) >= kOpcodes) throw std::invalid_argument("unknown operation");
        if (each.code == Opcode::kVendorSqrt && !has_vendor_sqrt())
            throw std::invalid_argument("torch's square root is not there");
        for (const std::size_t used : {each.out, each.a, each.b, each.c}) {
            if (used >= registers) throw std::invalid_argument("a register is not there");
            used_ |= std::uint32_t{1} << used;
        }
        if (is_fused(each.code)) {
            if (each.out != 0) throw std::invalid_argument("a fused step writes the parameter");
            used_ |= std::uint32_t{1} << 1;
        }
        if (each.out == 1) throw std::invalid_argument("the gradient is only read");
        if (each.out == 0) writes_param_ = true;
        reads_param_ = reads_param_ || is_fused(each.code) || each.a == 0 || each.b == 0 || each.c == 0;
    }
}

std::vector<StepResult> run_step(const std::vector<StepJob>& jobs, unsigned threads, InstructionSet set) {
    Run run(jobs, threads, set);
    run_on_crew(run.threads(), [&run] { run.work(); });
    return run.results();
}

struct StepRun::Impl {
    Impl(std::vector<StepJob> given, unsigned threads, InstructionSet set)
        : jobs(std::move(given)), run(jobs, threads, set), work(run.threads(), [this] { run.work(); }) {}

    const std::vector<StepJob> jobs;
    Run run;
    CrewWork work;
};

StepRun::StepRun(std::vector<StepJob> jobs, unsigned threads, InstructionSet set)
    : impl_(std::make_unique<Impl>(std::move(jobs), threads, set)) {}

StepRun::~StepRun() = default;

std::vector<StepResult> StepRun::wait() {
    impl_->work.wait();
    return impl_->run.results();
}

}  // namespace swapper
