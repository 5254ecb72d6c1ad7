#include "step_kernels.h"

#include <cmath>
#include <initializer_list>
#include <stdexcept>

#include "vendor_sqrt.h"

#if defined(__clang__)
#define STEP_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define STEP_LOOP _Pragma("GCC ivdep")
#endif

namespace swapper {
namespace {

using codec::Byte;

// x * y + z with one rounding. Of the compiler, which makes an instruction of it where the processor has one.
CODEC_INLINE float fma1(float x, float y, float z) {
    return __builtin_fmaf(x, y, z);
}

CODEC_INLINE float sign_of(float x) {
    return static_cast<float>(x > 0.0F) - static_cast<float>(x < 0.0F);
}

CODEC_INLINE float larger_of(float x, float y) {
    return x > y || x != x ? x : y;
}

// a * b + c * d with one rounding of the sum: the first product, or the second, is not rounded before.
template <bool first>
CODEC_INLINE float sum_of_products(float a, float b, float c, float d) {
    return first ? fma1(a, b, c * d) : fma1(c, d, a * b);
}

enum class Decay { kNone = 0, kCoupled = 1, kDecoupled = 2 };

// Of which kind of loop of torch's the larger of two is, if any: vectors have a NaN wherever one of the two
// is one, the rest where the former is. Of 0.0 and -0.0 vectors have the second, the rest the first.
enum class Largest { kNone, kOfVectors, kOfRest };

// A step of Adam or AdamW, as torch's fused kernel has it.
struct FusedAdam {
    explicit FusedAdam(const Instruction& it) {
        const auto number = [&](std::size_t i) { return static_cast<float>(it.constants[i]); };
        step_size = number(adam::kStepSize);
        bias2_sqrt = number(adam::kBias2Sqrt);
        weight = number(adam::kWeight);
        beta2 = number(adam::kBeta2);
        square_weight = number(adam::kSquareWeight);
        eps = number(adam::kEps);
        sign = number(adam::kSign);
        factor = number(adam::kFactor);
        decay = static_cast<Decay>(static_cast<int>(it.constants[adam::kDecay]));
        amsgrad = it.constants[adam::kAmsgrad] != 0;
    }

    template <bool first, Largest largest_, Decay decay_, bool near>
    CODEC_INLINE void run(float* param, const float* gradient, float* mean, float* square, float* largest,
                          std::size_t numel) const {
        const FusedAdam k = *this;
        const float coefficient = near ? k.weight : k.weight - 1.0F;
        STEP_LOOP for (std::size_t i = 0; i < numel; ++i) {
            float p = param[i];
            float g = gradient[i] * k.sign;
            if constexpr (decay_ == Decay::kCoupled) g = fma1(p, k.factor, g);
            if constexpr (decay_ == Decay::kDecoupled) p = p * k.factor;
            const float m = mean[i];
            const float new_mean = fma1(coefficient, g - m, near ? m : g);
            float v = sum_of_products<first>(square[i], k.beta2, k.square_weight * g, g);
            mean[i] = new_mean;
            square[i] = v;
            if constexpr (largest_ == Largest::kOfVectors) v = larger_of(largest[i], v);
            if constexpr (largest_ == Largest::kOfRest) v = largest[i] < v ? v : largest[i];
            if constexpr (largest_ != Largest::kNone) largest[i] = v;
            const float denominator = __builtin_sqrtf(v) / k.bias2_sqrt + k.eps;
            param[i] = p + k.step_size * new_mean / denominator;
        }
    }

    template <bool first, Largest largest_, Decay decay_>
    CODEC_INLINE void run_near(float* param, const float* gradient, float* mean, float* square,
                               float* largest, std::size_t numel) const {
        if (std::fabs(weight) < 0.5F) {
            run<first, largest_, decay_, true>(param, gradient, mean, square, largest, numel);
        } else {
            run<first, largest_, decay_, false>(param, gradient, mean, square, largest, numel);
        }
    }

    template <bool first, Largest largest_>
    CODEC_INLINE void run_decay(float* param, const float* gradient, float* mean, float* square,
                                float* largest, std::size_t numel) const {
        if (decay == Decay::kNone)
            run_near<first, largest_, Decay::kNone>(param, gradient, mean, square, largest, numel);
        if (decay == Decay::kCoupled)
            run_near<first, largest_, Decay::kCoupled>(param, gradient, mean, square, largest, numel);
        if (decay == Decay::kDecoupled)
            run_near<first, largest_, Decay::kDecoupled>(param, gradient, mean, square, largest, numel);
    }

    template <bool first, bool rest>
    CODEC_INLINE void run_part(float* const* state, float* param, const float* gradient, std::size_t begin,
                               std::size_t numel) const {
        float* const mean = state[0] + begin;
        float* const square = state[1] + begin;
        if (amsgrad) {
            constexpr Largest kLargest = rest ? Largest::kOfRest : Largest::kOfVectors;
            run_decay<first, kLargest>(param, gradient, mean, square, state[2] + begin, numel);
        } else {
            run_decay<first, Largest::kNone>(param, gradient, mean, square, nullptr, numel);
        }
    }

    float step_size, bias2_sqrt, weight, beta2, square_weight, eps, sign, factor;
    Decay decay;
    bool amsgrad;
};

struct FusedSgd {
    explicit FusedSgd(const Instruction& it) {
        const auto number = [&](std::size_t i) { return static_cast<float>(it.constants[i]); };
        lr = number(sgd::kMinusLr);
        momentum = number(sgd::kMomentum);
        weight_decay = number(sgd::kWeightDecay);
        undamped = number(sgd::kUndamped);
        sign = number(sgd::kSign);
        moves = momentum != 0;
        nesterov = it.constants[sgd::kNesterov] != 0;
    }

    template <bool first, bool moves_, bool nesterov_, bool decays>
    CODEC_INLINE void run(float* param, const float* gradient, float* buffer, std::size_t numel) const {
        const FusedSgd k = *this;
        STEP_LOOP for (std::size_t i = 0; i < numel; ++i) {
            const float p = param[i];
            float g = gradient[i] * k.sign;
            if constexpr (decays) g = fma1(p, k.weight_decay, g);
            if constexpr (moves_) {
                const float moved = sum_of_products<first>(buffer[i], k.momentum, g, k.undamped);
                buffer[i] = moved;
                g = nesterov_ ? fma1(moved, k.momentum, g) : moved;
            }
            param[i] = fma1(g, k.lr, p);
        }
    }

    template <bool first, bool decays>
    CODEC_INLINE void run_kind(float* param, const float* gradient, float* buffer, std::size_t numel) const {
        if (!moves) {
            run<first, false, false, decays>(param, gradient, buffer, numel);
        } else if (nesterov) {
            run<first, true, true, decays>(param, gradient, buffer, numel);
        } else {
            run<first, true, false, decays>(param, gradient, buffer, numel);
        }
    }

    template <bool first, bool rest>
    CODEC_INLINE void run_part(float* const* state, float* param, const float* gradient, std::size_t begin,
                               std::size_t numel) const {
        float* const buffer = moves ? state[0] + begin : nullptr;
        if (weight_decay != 0) {
            run_kind<first, true>(param, gradient, buffer, numel);
        } else {
            run_kind<first, false>(param, gradient, buffer, numel);
        }
    }

    float lr, momentum, weight_decay, undamped, sign;
    bool moves, nesterov;
};

struct FusedAdagrad {
    explicit FusedAdagrad(const Instruction& it) {
        const auto number = [&](std::size_t i) { return static_cast<float>(it.constants[i]); };
        rate = number(adagrad::kRate);
        weight_decay = number(adagrad::kWeightDecay);
        eps = number(adagrad::kEps);
        sign = number(adagrad::kSign);
    }

    template <bool decays>
    CODEC_INLINE void run(float* param, const float* gradient, float* sum, std::size_t numel) const {
        const FusedAdagrad k = *this;
        STEP_LOOP for (std::size_t i = 0; i < numel; ++i) {
            const float p = param[i];
            float g = gradient[i] * k.sign;
            if constexpr (decays) g = fma1(p, k.weight_decay, g);
            const float s = fma1(g, g, sum[i]);
            sum[i] = s;
            param[i] = p - k.rate * g / (__builtin_sqrtf(s) + k.eps);
        }
    }

    template <bool first, bool rest>
    CODEC_INLINE void run_part(float* const* state, float* param, const float* gradient, std::size_t begin,
                               std::size_t numel) const {
        if (weight_decay != 0) {
            run<true>(param, gradient, state[0] + begin, numel);
        } else {
            run<false>(param, gradient, state[0] + begin, numel);
        }
    }

    float rate, weight_decay, eps, sign;
};

template <typename Step, bool rest>
CODEC_INLINE void run_fused_part(const Step& step, const Instruction& it, float* const* registers,
                                 std::size_t begin, std::size_t numel) {
    float* const state[] = {registers[it.a], registers[it.b], registers[it.c]};
    float* const param = registers[0] + begin;
    const float* const gradient = registers[1] + begin;
    if ((it.contraction >> (rest ? 1 : 0) & 1) != 0) {
        step.template run_part<true, rest>(state, param, gradient, begin, numel);
    } else {
        step.template run_part<false, rest>(state, param, gradient, begin, numel);
    }
}

// torch's fused kernels go through whole vectors of 8 elements, and another loop does the rest.
template <typename Step>
CODEC_INLINE void run_fused(const Instruction& it, float* const* registers, std::size_t numel) {
    const Step step(it);
    const std::size_t whole = numel - numel % 8;
    run_fused_part<Step, false>(step, it, registers, 0, whole);
    run_fused_part<Step, true>(step, it, registers, whole, numel - whole);
}

// `expression` for each element i of out, from a, b and c, which may be the same memory as out.
#define STEP_CASE(code, expression)                         \
    case Opcode::code:                                      \
        STEP_LOOP for (std::size_t i = 0; i < numel; ++i) { \
            out[i] = (expression);                          \
        }                                                   \
        break

CODEC_INLINE void run_tile(const Instruction* instructions, std::size_t count, float* const* registers,
                           std::size_t numel) {
    for (const Instruction* at = instructions; at != instructions + count; ++at) {
        const Instruction& it = *at;
        float* const out = registers[it.out];
        const float* const a = registers[it.a];
        const float* const b = registers[it.b];
        const float* const c = registers[it.c];
        const auto x = static_cast<float>(it.constants[0]);
        switch (it.code) {
            STEP_CASE(kCopy, a[i]);
            STEP_CASE(kNeg, -a[i]);
            STEP_CASE(kAbs, std::fabs(a[i]));
            STEP_CASE(kSign, sign_of(a[i]));
            STEP_CASE(kReciprocal, 1.0F / a[i]);
            STEP_CASE(kAdd, fma1(b[i], x, a[i]));
            STEP_CASE(kAddNumber, a[i] + x);
            STEP_CASE(kMul, a[i] * b[i]);
            STEP_CASE(kMulNumber, a[i] * x);
            STEP_CASE(kDiv, a[i] / b[i]);
            STEP_CASE(kDivNumber, a[i] / x);
            STEP_CASE(kAddcmul, fma1(x * b[i], c[i], a[i]));
            STEP_CASE(kAddcdiv, a[i] + x * b[i] / c[i]);
            STEP_CASE(kMaximum, larger_of(a[i], b[i]));
            STEP_CASE(kRsqrt, 1.0F / __builtin_sqrtf(a[i]));
            STEP_CASE(kFill, x);
            STEP_CASE(kClampMin, a[i] < x ? x : a[i]);
            STEP_CASE(kClampMax, x < a[i] ? x : a[i]);
            case Opcode::kLerp:
                if (std::fabs(x) < 0.5F) {
                    STEP_LOOP for (std::size_t i = 0; i < numel; ++i) out[i] = fma1(x, b[i] - a[i], a[i]);
                } else {
                    const float back = x - 1.0F;
                    STEP_LOOP for (std::size_t i = 0; i < numel; ++i) out[i] = fma1(back, b[i] - a[i], b[i]);
                }
                break;
            case Opcode::kVendorSqrt:
                vendor_sqrt(a, out, numel);
                break;
            case Opcode::kFusedAdam:
                run_fused<FusedAdam>(it, registers, numel);
                break;
            case Opcode::kFusedSgd:
                run_fused<FusedSgd>(it, registers, numel);
                break;
            case Opcode::kFusedAdagrad:
                run_fused<FusedAdagrad>(it, registers, numel);
                break;
        }
    }
}

CODEC_INLINE void widen_half(const Byte* half, float* out, std::size_t numel) {
    auto* const wide = reinterpret_cast<Byte*>(out);
    STEP_LOOP for (std::size_t i = 0; i < numel; ++i) {
        codec::store16(wide, 2 * i, 0);
        codec::store16(wide, 2 * i + 1, codec::load16(half, i));
    }
}

#define STEP_VARIANT(name, ...)                                                                      \
    struct name {                                                                                    \
        __VA_ARGS__ static void run(const Instruction* instructions, std::size_t count,              \
                                    float* const* registers, std::size_t numel) {                    \
            run_tile(instructions, count, registers, numel);                                         \
        }                                                                                            \
        __VA_ARGS__ static void widen(const Byte* half, float* out, std::size_t numel) {             \
            widen_half(half, out, numel);                                                            \
        }                                                                                            \
        __VA_ARGS__ static std::size_t count(const Byte* low, std::size_t numel) {                   \
            return codec::count_ties(low, numel);                                                    \
        }                                                                                            \
        __VA_ARGS__ static std::size_t join(const Byte* param, const Byte* low, const Byte* ties,    \
                                            std::size_t bit, Byte* master, std::size_t numel) {      \
            return codec::join_piece(param, low, ties, bit, master, numel);                          \
        }                                                                                            \
        __VA_ARGS__ static void split(const Byte* master, Byte* param, Byte* low, std::size_t numel, \
                                      codec::PieceTies& ties) {                                      \
            codec::split_piece(master, param, low, numel, ties);                                     \
        }                                                                                            \
        static constexpr StepKernels kernels{run, widen, count, join, split};                        \
    }

STEP_VARIANT(Baseline, );
#if defined(__x86_64__)
STEP_VARIANT(Avx2, __attribute__((target("avx2,fma"))));
STEP_VARIANT(Avx512,
             __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq" CODEC_WIDE_VECTORS))));
#endif

}  // namespace

bool has_instruction_set(InstructionSet set) {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (set == InstructionSet::kAvx2) return has_avx2;
    if (set == InstructionSet::kAvx512) {
        return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    }
#endif
    return set == InstructionSet::kBaseline;
}

InstructionSet best_instruction_set() {
    for (const auto set : {InstructionSet::kAvx512, InstructionSet::kAvx2}) {
        if (has_instruction_set(set)) return set;
    }
    return InstructionSet::kBaseline;
}

const StepKernels& step_kernels(InstructionSet set) {
    if (!has_instruction_set(set)) throw std::invalid_argument("this processor lacks the instruction set");
#if defined(__x86_64__)
    if (set == InstructionSet::kAvx512) return Avx512::kernels;
    if (set == InstructionSet::kAvx2) return Avx2::kernels;
#endif
    return Baseline::kernels;
}

}  // namespace swapper
