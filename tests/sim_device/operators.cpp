// Operators of the device that are more than torch's kernel for the CPU: memory, views, copies, and what
// torch takes apart differently for a device of its own.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/record_stream_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>

#include "backend.h"
#include "kernels.h"
#include "world.h"

namespace sim {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// --- Memory and views

at::Tensor empty_memory_format(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<at::Device> device,
                               std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
    const c10::DeviceGuard guard(device.value_or(c10::Device(kDeviceType)));
    return at::detail::empty_generic(sizes, c10::GetAllocator(kDeviceType), kKeys,
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device,
                         std::optional<bool> pin_memory) {
    TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
    const c10::DeviceGuard guard(device.value_or(c10::Device(kDeviceType)));
    return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kDeviceType), kKeys,
                                             c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
    return at::cpu::as_strided_symint(self, sizes, strides, std::move(offset));
}

// torch's own makes memory longer by a copy on the host.
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
    const c10::IntArrayRef wanted = C10_AS_INTARRAYREF_SLOW(sizes);
    const size_t length = at::detail::computeStorageNbytesContiguous(
        wanted, self.itemsize(), static_cast<size_t>(self.storage_offset()));
    if (self.storage().nbytes() > 0 && length > self.storage().nbytes()) {
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), length);
    }
    return at::native::resize_(self, wanted, format);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
    return at::native::set_(self, std::move(source));
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                               at::IntArrayRef strides) {
    return at::cpu::set_(self, std::move(storage), offset, sizes, strides);
}

// --- Copies

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
    if (destination.sizes() != self.sizes()) resize_(destination, self.sym_sizes(), std::nullopt);
    return start_copy(self, destination, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
    return self.cpu().item();
}

// As on CUDA: `model.to` and `tensor.data = other` take the tensor from one device to the other.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& other) {
    const auto is_dense = [](const at::Tensor& tensor) {
        return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.device().type() == kDeviceType);
    };
    return is_dense(self) == is_dense(other) && self.layout() == other.layout();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
    Entered()->memory.record(self.storage().mutable_data(), static_cast<int>(stream.id()));
}

// --- Kernels

const c10::OperatorHandle& convolution() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
    return op;
}

const c10::OperatorHandle& convolution_backward() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    return op;
}

void start(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    start_kernel(op, stack);
}

void start_convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    start_kernel(convolution(), stack);
}

void start_convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const size_t first = stack->size() - op.schema().arguments().size();
    const at::Tensor weight = (*stack)[first + 2].toTensor();
    const bool transposed = (*stack)[first + 6].toBool();
    const int64_t groups = (*stack)[first + 8].toInt();
    const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
    stack->insert(stack->begin() + static_cast<ptrdiff_t>(first + 3), std::vector<int64_t>{channels});
    start_kernel(convolution_backward(), stack);
}

// Of integers too, as on CUDA: models that route tokens to experts count them so.
void start_histc(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const size_t first = stack->size() - op.schema().arguments().size();
    const at::Tensor given = (*stack)[first].toTensor();
    const bool is_integral = at::isIntegralType(given.scalar_type(), true);
    if (is_integral) (*stack)[first] = given.to(at::kDouble);
    start_kernel(op, stack);
    if (is_integral) stack->back() = stack->back().toTensor().to(given.scalar_type());
}

// SDPBackend::math: of operators that have kernels.
int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
    return 0;
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
    if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
    const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
    return {input * mask * (p == 1 ? 0 : 1 / (1 - p)), mask};
}

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& a_bias,
                  const std::optional<at::Tensor>& b_bias) {
    at::Tensor sum = a + b;
    for (const auto& bias : {a_bias, b_bias}) {
        if (bias && bias->defined()) sum = sum + *bias;
    }
    return sum;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, const at::Tensor& hidden,
                                                         const at::Tensor& cx,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
    const auto gates = sum_of(input, hidden, input_bias, hidden_bias).chunk(4, 1);
    const at::Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(),
                     o = gates[3].sigmoid();
    const at::Tensor cy = f * cx + i * g;
    return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& grad_hy,
                                                                  const std::optional<at::Tensor>& grad_cy,
                                                                  const at::Tensor& cx, const at::Tensor& cy,
                                                                  const at::Tensor& workspace,
                                                                  bool has_bias) {
    const auto gates = workspace.chunk(4, 1);
    const at::Tensor &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
    const bool has_hy = grad_hy && grad_hy->defined(), has_cy = grad_cy && grad_cy->defined();
    if (!has_hy && !has_cy) return {};
    const at::Tensor tanh_cy = cy.tanh();
    const at::Tensor of_hy = has_hy ? *grad_hy : at::zeros_like(cy);
    at::Tensor of_cy = of_hy * o * (1 - tanh_cy * tanh_cy);
    if (has_cy) of_cy = of_cy + *grad_cy;
    const at::Tensor of_gates = at::cat({of_cy * g * i * (1 - i), of_cy * cx * f * (1 - f),
                                         of_cy * i * (1 - g * g), of_hy * tanh_cy * o * (1 - o)},
                                        1);
    return {of_gates, of_cy * f, has_bias ? of_gates.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input, const at::Tensor& hidden,
                                            const at::Tensor& hx, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
    const auto of_input = sum_of(input, at::zeros_like(input), input_bias, {}).chunk(3, 1);
    const auto of_hidden = sum_of(hidden, at::zeros_like(hidden), hidden_bias, {}).chunk(3, 1);
    const at::Tensor r = (of_input[0] + of_hidden[0]).sigmoid(), z = (of_input[1] + of_hidden[1]).sigmoid();
    const at::Tensor n = (of_input[2] + r * of_hidden[2]).tanh();
    return {n + z * (hx - n), at::cat({r, z, n, hx, of_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
    const auto kept = workspace.chunk(5, 1);
    const at::Tensor &r = kept[0], &z = kept[1], &n = kept[2], &hx = kept[3], &hidden_n = kept[4];
    const at::Tensor of_n = grad_hy * (1 - z) * (1 - n * n);
    const at::Tensor of_z = grad_hy * (hx - n) * z * (1 - z);
    const at::Tensor of_r = of_n * hidden_n * r * (1 - r);
    const at::Tensor of_input = at::cat({of_r, of_z, of_n}, 1),
                     of_hidden = at::cat({of_r, of_z, of_n * r}, 1);
    const auto bias = [has_bias](const at::Tensor& gradient) {
        return has_bias ? gradient.sum(0) : at::Tensor();
    };
    return {of_input, of_hidden, grad_hy * z, bias(of_input), bias(of_hidden)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty_memory_format);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", as_strided);
    m.impl("resize_", resize_);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("view", view);
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_.source_Storage", set_storage);
    m.impl("set_.source_Storage_storage_offset", set_storage_offset);
    m.impl("_copy_from", start_copy);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar_dense);
    m.impl("record_stream", record_stream);
    m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
    m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&start_convolution>());
    m.impl("convolution_backward_overrideable",
           torch::CppFunction::makeFromBoxedFunction<&start_convolution_backward>());
    // Torch has these for any device, with other bits than on the CPU.
    for (const char* const name : {"native_layer_norm", "native_group_norm"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&start>());
    }
    m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&start_histc>());
    m.impl("_fused_sdp_choice", fused_sdp_choice);
    m.impl("native_dropout", native_dropout);
    m.impl("_thnn_fused_lstm_cell", lstm_cell);
    m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
    m.impl("_thnn_fused_gru_cell", gru_cell);
    m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

// Before the keys of tensor subclasses, as CUDA has no kernel for it: `tensor.data = a wrapper` comes here.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
    m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
}

// A copy takes care of these itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&start>());
}

// --- For Python

void initialize() {
    at::globalContext().lazyInitDevice(kDeviceType);
}

void configure(const std::string& mode, int64_t seed, double max_delay_us, bool poison_now,
               bool poison_reused) {
    TORCH_CHECK_VALUE(mode == "eager" || mode == "random" || mode == "lazy",
                      "mode must be 'eager', 'random' or 'lazy', not '", mode, "'");
    const Entered world;
    const Mode which = mode == "eager" ? Mode::eager : mode == "random" ? Mode::random : Mode::lazy;
    world->scheduler.configure(which, static_cast<uint64_t>(seed), max_delay_us);
    world->memory.poison_now = poison_now;
    world->memory.poison_reused = poison_reused;
    world->memory.reap();
}

void keep_time(const std::vector<double>& given) {
    TORCH_CHECK_VALUE(given.size() == 6, "six speeds are needed");
    for (size_t i = 0; i < given.size(); ++i) {
        TORCH_CHECK_VALUE(i == 1 ? given[i] >= 0 : given[i] > 0, "times and speeds must be positive");
    }
    const Entered world;
    world->scheduler.keep_time({given[0], given[1], given[2], given[3], given[4], given[5]});
    world->memory.poison_now = world->memory.poison_reused = false;
    world->memory.reap();
}

// Now, how long the host has waited, and how long kernels, copies up and copies down took, since `keep_time`.
// In microseconds.
std::vector<double> times_us() {
    const Entered world;
    const Scheduler& scheduler = world->scheduler;
    return {scheduler.now_us(),
            scheduler.waited_us(),
            scheduler.busy_us(Engine::kernels),
            scheduler.busy_us(Engine::up),
            scheduler.busy_us(Engine::down),
            scheduler.busy_us(Engine::drive)};
}

// Starts a transfer of the drive on the current stream. It moves nothing.
void drive(int64_t device, double us) {
    Entered()->scheduler.push(current_stream(static_cast<int>(device)),
                              {{}, {}, {}, us, "drive", Engine::drive});
}

void set_limit(int64_t device, int64_t length) {
    Entered()->memory.device(static_cast<int>(device)).limit = static_cast<size_t>(length);
}

int64_t refuse_at(int64_t n) {
    return Entered()->memory.refuse_at(n);
}

void sleep(int64_t device, double us) {
    Entered()->scheduler.push(current_stream(static_cast<int>(device)), {{}, {}, {}, us, "sleep"});
}

int64_t fail_at(int64_t n) {
    return Entered()->scheduler.fail_at(n);
}

void host_register(int64_t address, int64_t length) {
    Entered()->host.lock(reinterpret_cast<void*>(address), static_cast<size_t>(length));
}

void host_unregister(int64_t address) {
    Entered()->host.unlock(reinterpret_cast<void*>(address));
}

// As the function of builds for CUDA that torch calls `_set_storage_data_ptr_access_error_msg`.
void refuse_access(int64_t storage, const std::string& message) {
    reinterpret_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(
        message);
}

std::vector<std::string> violations() {
    const Entered world;
    for (int stream = 0; stream < world->scheduler.stream_count(); ++stream) {
        world->scheduler.wait(world->scheduler.mark(stream));
    }
    std::vector<std::string> found = world->memory.take_violations();
    const std::string failure = world->scheduler.take_failure();
    if (!failure.empty()) found.push_back("a kernel failed: " + failure);
    return found;
}

void manual_seed(int64_t device, int64_t seed) {
    default_generator(static_cast<int>(device))
        .unsafeGetGeneratorImpl()
        ->set_current_seed(static_cast<uint64_t>(seed));
}

at::Tensor rng_state(int64_t device) {
    return default_generator(static_cast<int>(device)).get_state();
}

void set_rng_state(int64_t device, const at::Tensor& state) {
    at::Generator generator = default_generator(static_cast<int>(device));
    generator.set_state(state);
}

TORCH_LIBRARY(sim, m) {
    m.def("initialize() -> ()", initialize);
    m.def("configure(str mode, int seed, float max_delay_us, bool poison_now, bool poison_reused) -> ()",
          configure);
    m.def("keep_time(float[] speeds) -> ()", keep_time);
    m.def("times_us() -> float[]", times_us);
    m.def("set_limit(int device, int length) -> ()", set_limit);
    m.def("sleep(int device, float us) -> ()", sleep);
    m.def("drive(int device, float us) -> ()", drive);
    m.def("fail_at(int n) -> int", fail_at);
    m.def("refuse_at(int n) -> int", refuse_at);
    m.def("host_register(int address, int length) -> ()", host_register);
    m.def("host_unregister(int address) -> ()", host_unregister);
    m.def("refuse_access(int storage, str message) -> ()", refuse_access);
    m.def("contexts() -> int[]", contexts);
    m.def("forget_contexts() -> ()", [] { forget_contexts(); });
    m.def("violations() -> str[]", violations);
    m.def("waiting_operators() -> str[]", waiting_operators);
    m.def("device_count() -> int", [] { return static_cast<int64_t>(kDevices); });
    m.def("is_forked() -> bool", [] { return is_forked(); });
    m.def("manual_seed(int device, int seed) -> ()", manual_seed);
    m.def("rng_state(int device) -> Tensor", rng_state);
    m.def("set_rng_state(int device, Tensor state) -> ()", set_rng_state);
}

}  // namespace
}  // namespace sim
