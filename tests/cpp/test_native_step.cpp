// Native steps: every array ends where its memory ends, and what is written does not depend on threads.
#include "native_step.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "bf16_codec.h"
#include "check.h"
#include "codec.h"
#include "crc32c.h"
#include "int8_codec.h"

using swapper::EncodedArray;
using swapper::Instruction;
using swapper::InstructionSet;
using swapper::Opcode;
using swapper::run_step;
using swapper::StepJob;
using swapper::StepProgram;
using swapper::StepRun;

namespace {

Instruction make(Opcode code, uint8_t out, uint8_t a, uint8_t b, uint8_t c, double x = 0) {
    Instruction it;
    it.code = code;
    it.out = out;
    it.a = a;
    it.b = b;
    it.c = c;
    it.constants[0] = x;
    return it;
}

// momentum = 0.9 * momentum + gradient; param -= 0.1 * momentum, by way of a register of the tile.
std::shared_ptr<StepProgram> momentum_program() {
    return std::make_shared<StepProgram>(
        std::vector<Instruction>{make(Opcode::kMulNumber, 3, 2, 2, 2, 0.9),
                                 make(Opcode::kAdd, 2, 3, 1, 1, 1.0), make(Opcode::kAdd, 0, 0, 2, 2, -0.1)},
        1, 4);
}

struct Segment {
    explicit Segment(size_t numel, uint64_t seed) : master(numel), momentum(numel), gradient(numel) {
        std::mt19937_64 random(seed);
        for (size_t i = 0; i < numel; ++i) {
            // One in four is a tie.
            uint32_t value = static_cast<uint32_t>(random()) & 0xBFFFFFFF;
            if (random() % 4 == 0) value = (value & 0xFFFF0000) | 0x8000;
            std::memcpy(&master[i], &value, 4);
            momentum[i] = static_cast<float>(random() % 1000) / 7;
            gradient[i] = static_cast<uint16_t>(0x3F00 + random() % 256);
        }
        bits.resize(numel);
        low.resize(numel);
        ties.resize(swapper::ties_bytes_max(numel));
        new_ties.resize(ties.size());
        tie_bits = swapper::split_master(master.data(), bits.data(), low.data(), ties.data(), numel, 1);
    }

    StepJob job(const std::shared_ptr<StepProgram>& program) {
        StepJob made;
        made.program = program;
        made.numel = master.size();
        made.bits = bits.data();
        made.low = low.data();
        made.ties = ties.data();
        made.tie_bits = tie_bits;
        made.new_ties = new_ties.data();
        made.gradient = gradient.data();
        made.is_half = true;
        made.arrays = {momentum.data()};
        return made;
    }

    std::vector<float> master, momentum;
    std::vector<uint16_t> gradient, bits, low;
    std::vector<unsigned char> ties, new_ties;
    size_t tie_bits = 0;
};

float widened(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value = 0;
    std::memcpy(&value, &bits, 4);
    return value;
}

void test_a_split_master_is_stepped(size_t numel, unsigned threads, InstructionSet set) {
    Segment segment(numel, numel);
    Segment other(100, 7);
    const auto program = momentum_program();
    const auto results = run_step({segment.job(program), other.job(program)}, threads, set);
    CHECK(results.size() == 2);
    std::vector<float> stepped(segment.master);
    const Segment fresh(numel, numel);
    for (size_t i = 0; i < numel; ++i) {
        const float moved = std::fma(widened(fresh.gradient[i]), 1.0F, fresh.momentum[i] * 0.9F);
        CHECK(segment.momentum[i] == moved);
        stepped[i] = std::fma(moved, -0.1F, stepped[i]);
    }
    std::vector<uint16_t> bits(numel);
    std::vector<uint16_t> low(numel);
    std::vector<unsigned char> ties(swapper::ties_bytes_max(numel));
    const size_t count =
        swapper::split_master(stepped.data(), bits.data(), low.data(), ties.data(), numel, 1);
    CHECK(results[0].tie_bits == count);
    CHECK(bits == segment.bits && low == segment.low);
    CHECK(std::equal(ties.begin(), ties.begin() + static_cast<ptrdiff_t>((count + 7) / 8),
                     segment.new_ties.begin()));
    CHECK(results[0].crc == swapper::crc32c(bits.data(), 2 * numel));
}

// An array that is stored as `encoding`, whose memory ends where it ends.
struct Encoded {
    Encoded(EncodedArray::Encoding kind, const std::vector<float>& values, uint64_t from)
        : encoding(kind), first(from), numel(values.size()) {
        data.resize((is_int8() ? 1 : 2) * numel);
        scales.resize(is_int8() ? sizeof(float) * swapper::blocks_of(numel) : 0);
        encode(values);
    }

    bool is_int8() const { return encoding == EncodedArray::Encoding::kInt8; }

    void encode(const std::vector<float>& values) {
        if (is_int8()) {
            swapper::encode_int8(values.data(), data.data(), scales.data(), numel, first, key, 1);
        } else {
            swapper::encode_bf16(values.data(), data.data(), numel, first, key, 1);
        }
    }

    std::vector<float> decoded() const {
        std::vector<float> values(numel);
        if (is_int8()) {
            swapper::decode_int8(data.data(), scales.data(), values.data(), numel, 1);
        } else {
            swapper::decode_bf16(data.data(), values.data(), numel, 1);
        }
        return values;
    }

    EncodedArray array(bool decodes, bool encodes) {
        EncodedArray made;
        made.encoding = encoding;
        made.decodes = decodes;
        made.encodes = encodes;
        made.data = data.data();
        made.scales = is_int8() ? scales.data() : nullptr;
        made.first = first;
        made.key = key;
        return made;
    }

    EncodedArray::Encoding encoding;
    uint64_t first;
    size_t numel;
    swapper::RoundingKey key{1, 2, 3, 4};
    std::vector<unsigned char> data, scales;
};

// As decoded before, stepped, and encoded after: in the tile alone, or in memory by two passes.
void test_encoded_arrays(EncodedArray::Encoding encoding, size_t numel, unsigned threads,
                         InstructionSet set) {
    Segment plain(numel, numel);
    const uint64_t first = encoding == EncodedArray::Encoding::kInt8 ? 768 : 301;
    const Encoded before(encoding, plain.momentum, first);
    plain.momentum = before.decoded();
    const std::vector<float> given = plain.momentum;
    const auto program = momentum_program();
    const auto expected = run_step({plain.job(program)}, threads, set);
    Encoded after(before);
    after.encode(plain.momentum);

    Segment in_tile(numel, numel);
    Encoded stored(before);
    StepJob job = in_tile.job(program);
    job.arrays = {nullptr};
    job.encoded = {stored.array(true, true)};
    const auto results = run_step({job}, threads, set);
    CHECK(results[0].tie_bits == expected[0].tie_bits && results[0].crc == expected[0].crc);
    CHECK(in_tile.bits == plain.bits && in_tile.low == plain.low);
    CHECK(stored.data == after.data && stored.scales == after.scales);

    Segment in_memory(numel, numel);
    stored = before;
    const auto nothing = std::make_shared<StepProgram>(std::vector<Instruction>{}, 1, 3);
    job = in_memory.job(nothing);
    job.encoded = {stored.array(true, false)};
    run_step({job}, threads, set);
    CHECK(in_memory.momentum == given);
    CHECK(stored.data == before.data && stored.scales == before.scales);
    job = in_memory.job(program);
    job.encoded = {stored.array(false, true)};
    run_step({job}, threads, set);
    CHECK(in_memory.momentum == plain.momentum && in_memory.bits == plain.bits);
    CHECK(stored.data == after.data && stored.scales == after.scales);
}

void test_encoded_arrays_that_are_not_as_described_are_refused() {
    Segment segment(1000, 3);
    Encoded stored(EncodedArray::Encoding::kInt8, segment.momentum, 0);
    const auto refuses = [&](const EncodedArray& array, bool in_tile) {
        StepJob job = segment.job(momentum_program());
        if (in_tile) job.arrays = {nullptr};
        job.encoded = {array};
        CHECK_THROWS(std::invalid_argument, run_step({job}, 1, InstructionSet::kBaseline));
    };
    refuses(stored.array(false, true), true);  // used, and not decoded
    EncodedArray array = stored.array(true, true);
    array.first = 100;
    refuses(array, true);
    array = stored.array(true, true);
    array.data = nullptr;
    refuses(array, true);
    array = stored.array(true, true);
    array.scales = nullptr;
    refuses(array, true);
    array = stored.array(true, true);
    array.data = segment.momentum.data();
    refuses(array, false);
    refuses(EncodedArray{}, true);  // neither encoded nor there
    StepJob job = segment.job(momentum_program());
    job.encoded.resize(2);
    CHECK_THROWS(std::invalid_argument, run_step({job}, 1, InstructionSet::kBaseline));
}

// One fused step of a parameter of fp32 whose arrays end where their memory ends; `state` is changed.
std::vector<float> fused(const Instruction& it, std::vector<float> param, const std::vector<float>& gradient,
                         std::vector<std::vector<float>>& state, InstructionSet set) {
    StepJob job;
    job.program = std::make_shared<StepProgram>(std::vector<Instruction>{it}, state.size(), 2 + state.size());
    job.numel = param.size();
    job.param = param.data();
    job.gradient = gradient.data();
    for (auto& each : state) job.arrays.push_back(each.data());
    run_step({job}, 1, set);
    return param;
}

std::vector<float> drawn(size_t numel, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<float> values(numel);
    for (auto& each : values) each = static_cast<float>(random() % 2000) / 700;
    return values;
}

void test_fused_adagrad(size_t numel, InstructionSet set) {
    Instruction it = make(Opcode::kFusedAdagrad, 0, 2, 2, 2);
    it.constants = {0.1, 0.5, 1e-3, -1.0};  // rate, weight decay, eps, sign
    const auto param = drawn(numel, 1);
    const auto gradient = drawn(numel, 2);
    std::vector<std::vector<float>> state{drawn(numel, 3)};
    const auto before = state;
    const auto stepped = fused(it, param, gradient, state, set);
    for (size_t i = 0; i < numel; ++i) {
        const float g = std::fma(param[i], 0.5F, -gradient[i]);
        const float sum = std::fma(g, g, before[0][i]);
        CHECK(state[0][i] == sum);
        CHECK(stepped[i] == param[i] - 0.1F * g / (std::sqrt(sum) + 1e-3F));
    }
}

// The larger of two squares: in whole vectors a NaN if either is one, in the rest only if the former is.
void test_fused_amsgrad(size_t numel, InstructionSet set) {
    Instruction it = make(Opcode::kFusedAdam, 0, 2, 3, 4);
    it.constants = {-0.1, 0.9, 0.1, 0.99, 0.01, 1e-3, 1.0, 0.0, 0.0, 1.0};
    const auto param = drawn(numel, 1);
    const auto gradient = drawn(numel, 2);
    std::vector<std::vector<float>> state{drawn(numel, 3), drawn(numel, 4), drawn(numel, 5)};
    for (size_t i = 0; i < numel; i += 3) state[1 + i % 2][i] = NAN;
    const auto before = state;
    const auto stepped = fused(it, param, gradient, state, set);
    for (size_t i = 0; i < numel; ++i) {
        const float g = gradient[i];
        const float mean = std::fma(0.1F, g - before[0][i], before[0][i]);
        const float square = std::fma(0.01F * g, g, before[1][i] * 0.99F);
        const float former = before[2][i];
        const bool is_rest = i >= numel - numel % 8;
        float largest = former < square ? square : former;
        if (!is_rest && std::isnan(square)) largest = square;
        const float end = param[i] + -0.1F * mean / (std::sqrt(largest) / 0.9F + 1e-3F);
        const auto same = [](float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); };
        CHECK(state[0][i] == mean);
        CHECK(same(state[1][i], square) && same(state[2][i], largest) && same(stepped[i], end));
    }
}

void test_what_is_damaged_is_refused_before_anything_is_written() {
    const auto program = momentum_program();
    Segment good(70000, 1);
    Segment bad(70000, 2);
    bad.tie_bits -= 1;
    const Segment good_before = good;
    const Segment bad_before = bad;
    CHECK_THROWS(std::invalid_argument,
                 run_step({good.job(program), bad.job(program)}, 2, InstructionSet::kBaseline));
    CHECK(good.bits == good_before.bits && good.low == good_before.low &&
          good.momentum == good_before.momentum);
    CHECK(bad.bits == bad_before.bits && bad.low == bad_before.low && bad.momentum == bad_before.momentum);
}

void test_a_step_in_two_parts(size_t numel, unsigned threads) {
    const auto program = momentum_program();
    Segment one(numel, 1);
    Segment two(numel, 2);
    Segment other(numel, 3);
    const auto expected = [&](Segment segment) {
        run_step({segment.job(program)}, threads, InstructionSet::kBaseline);
        return segment.bits;
    };
    const auto ones = expected(one);
    const auto twos = expected(two);
    const auto others = expected(other);
    {
        StepRun dropped({one.job(program)}, threads, InstructionSet::kBaseline);
        // The crew is busy, or was: both of these are done by whom they are waited for.
        run_step({other.job(program)}, threads, InstructionSet::kBaseline);
        StepRun second({two.job(program)}, threads, InstructionSet::kBaseline);
        CHECK(second.wait().size() == 1 && two.bits == twos);
        CHECK(second.wait().size() == 1 && two.bits == twos);
        CHECK(other.bits == others);
    }
    CHECK(one.bits == ones);
    Segment bad(numel, 4);
    bad.tie_bits += 1;
    const Segment before = bad;
    StepRun damaged({bad.job(program)}, threads, InstructionSet::kBaseline);
    CHECK_THROWS(std::invalid_argument, damaged.wait());
    CHECK(bad.bits == before.bits && bad.low == before.low && bad.momentum == before.momentum);
    StepJob job = bad.job(program);
    job.arrays.clear();
    CHECK_THROWS(std::invalid_argument, StepRun({job}, threads, InstructionSet::kBaseline));
}

#if !defined(__SANITIZE_THREAD__)  // It allows no new threads after a fork.
// The child has none of the threads that step, and makes its own.
void test_a_child_does_not_wait_for_what_its_parent_steps() {
    const auto program = momentum_program();
    Segment segment(3'000'000, 1);
    Segment childs(70000, 2);
    StepRun run({segment.job(program)}, 2, InstructionSet::kBaseline);
    const pid_t child = fork();
    if (child == 0) {
        run.wait();
        StepRun own({childs.job(program)}, 2, InstructionSet::kBaseline);
        _exit(own.wait().size() == 1 ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(run.wait().size() == 1);
}
#endif

void test_what_is_not_as_described_is_refused() {
    const auto one = [](Instruction it) { return StepProgram({it}, 1, 4); };
    CHECK_THROWS(std::invalid_argument, one(make(Opcode::kCopy, 1, 0, 0, 0)));  // writes the gradient
    CHECK_THROWS(std::invalid_argument, one(make(Opcode::kCopy, 4, 0, 0, 0)));
    CHECK_THROWS(std::invalid_argument, one(make(Opcode::kCopy, 0, 0, 9, 0)));
    CHECK_THROWS(std::invalid_argument, one(make(static_cast<Opcode>(200), 0, 0, 0, 0)));
    CHECK_THROWS(std::invalid_argument, one(make(Opcode::kFusedSgd, 2, 2, 2, 2)));
    CHECK_THROWS(std::invalid_argument, StepProgram({}, 1, 99));
    Segment segment(100, 3);
    StepJob job = segment.job(momentum_program());
    job.arrays.clear();
    CHECK_THROWS(std::invalid_argument, run_step({job}, 1, InstructionSet::kBaseline));
    job = segment.job(momentum_program());
    job.low = segment.bits.data() + 1;
    CHECK_THROWS(std::invalid_argument, run_step({job}, 1, InstructionSet::kBaseline));
    job = segment.job(momentum_program());
    job.gradient = nullptr;
    CHECK_THROWS(std::invalid_argument, run_step({job}, 1, InstructionSet::kBaseline));
}

void test_threads_step_at_the_same_time_and_after_a_fork() {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 3; ++i) {
        threads.emplace_back([] {
            for (int round = 0; round < 20; ++round) {
                test_a_split_master_is_stepped(100003, 2, InstructionSet::kBaseline);
            }
        });
    }
    for (auto& each : threads) each.join();
#if !defined(__SANITIZE_THREAD__)  // It allows no new threads after a fork.
    const pid_t child = fork();
    if (child == 0) {
        test_a_split_master_is_stepped(100003, 4, InstructionSet::kBaseline);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

}  // namespace

int main() {
    for (const auto set : {InstructionSet::kAvx512, InstructionSet::kAvx2, InstructionSet::kBaseline}) {
        if (!swapper::has_instruction_set(set)) continue;
        for (const size_t numel : {1, 7, 64, 255, 257, 16384, 16385, 200003}) {
            for (const unsigned threads : {1U, 4U}) {
                test_a_split_master_is_stepped(numel, threads, set);
                test_encoded_arrays(EncodedArray::Encoding::kBf16, numel, threads, set);
                test_encoded_arrays(EncodedArray::Encoding::kInt8, numel, threads, set);
            }
            test_fused_adagrad(numel, set);
            test_fused_amsgrad(numel, set);
        }
    }
    for (const size_t numel : {100, 200003}) {
        for (const unsigned threads : {1U, 2U, 4U}) test_a_step_in_two_parts(numel, threads);
    }
    test_threads_step_at_the_same_time_and_after_a_fork();
#if !defined(__SANITIZE_THREAD__)
    test_a_child_does_not_wait_for_what_its_parent_steps();
#endif
    test_what_is_damaged_is_refused_before_anything_is_written();
    test_what_is_not_as_described_is_refused();
    test_encoded_arrays_that_are_not_as_described_are_refused();
    std::puts("native steps: passed");
    return 0;
}
