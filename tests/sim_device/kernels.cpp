#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "backend.h"
#include "world.h"

extern "C" {
[[gnu::weak]] void omp_set_num_threads(int number);
[[gnu::weak]] int MKL_Set_Num_Threads_Local(int number);
}

namespace sim {
namespace {

using torch::jit::Stack;

// What kernels of others have to say is not for the thread that waits.
class NoWarnings final : public c10::WarningHandler {
  public:
    void process(const c10::Warning&) override {}
};

// Within it kernels run in one thread. How many they may use is asked of the thread they are in, and may
// change their bits: they run in whichever thread waits, and autograd's have the number that was set when
// they began. By the libraries' own functions: torch's sets the number for the whole process.
class OneThread {
  public:
    OneThread() {
        if (omp_set_num_threads != nullptr) omp_set_num_threads(1);
        if (MKL_Set_Num_Threads_Local != nullptr) mkl_ = MKL_Set_Num_Threads_Local(1);
    }
    ~OneThread() {
        if (omp_set_num_threads != nullptr) omp_set_num_threads(openmp_);
        if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(mkl_);
    }
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

  private:
    const int openmp_ = at::get_num_threads();
    int mkl_ = 0;
};

// Kernels run in whichever thread waits: with the state of none, so that no mode or hook of that thread sees
// them.
class Isolated {
  public:
    Isolated() : state_(clean()) {}

  private:
    static const at::ThreadLocalState& clean() {
        static const at::ThreadLocalState state;
        return state;
    }
    static inline const at::ThreadLocalState& at_load_ = clean();

    static inline NoWarnings no_warnings_;

    at::ThreadLocalStateGuard state_;
    c10::WarningUtils::WarningHandlerGuard warnings_{&no_warnings_};
    at::AutoDispatchBelowADInplaceOrView below_autograd_;
    at::NoGradGuard no_grad_;
    OneThread one_thread_;
};

// One argument of a kernel: a value, or tensors.
struct Argument {
    enum class Kind { value, tensor, list, optional_list, seed };

    Kind kind = Kind::value;
    c10::IValue value;
    std::vector<std::optional<Operand>> tensors;
    uint64_t seed = 0;
};

enum class Place { host, meta, zeros };

std::optional<Operand> operand_of(const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? std::optional<Operand>(*tensor) : std::nullopt;
}

at::Tensor put(const std::optional<Operand>& operand, Place place) {
    if (!operand) return {};
    if (place == Place::zeros) return operand->as_zeros();
    return place == Place::meta ? operand->on_meta() : operand->on_host();
}

c10::IValue put(const Argument& argument, Place place) {
    switch (argument.kind) {
        case Argument::Kind::value:
            break;
        case Argument::Kind::tensor:
            return put(argument.tensors.front(), place);
        case Argument::Kind::list: {
            c10::List<at::Tensor> list;
            for (const auto& operand : argument.tensors) list.push_back(put(operand, place));
            return list;
        }
        case Argument::Kind::optional_list: {
            c10::List<std::optional<at::Tensor>> list;
            for (const auto& operand : argument.tensors) {
                list.push_back(operand ? std::optional(put(operand, place)) : std::nullopt);
            }
            return list;
        }
        case Argument::Kind::seed:
            return place == Place::meta ? c10::IValue() : at::detail::createCPUGenerator(argument.seed);
    }
    return argument.value;
}

// Those of which torch tells other shapes, or dtypes, for other devices.
const std::set<std::string> kOtherOnMeta = {"aten::_embedding_bag", "aten::_embedding_bag_forward_only",
                                            "aten::native_layer_norm", "aten::native_group_norm",
                                            "aten::native_batch_norm"};

// An operator and what it was called with.
class Kernel {
  public:
    Kernel(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> given) : op_(op) {
        const auto& described = op.schema().arguments();
        for (size_t i = 0; i < described.size(); ++i) find_device(given[i]);
        for (size_t i = 0; i < described.size(); ++i) arguments_.push_back(taken(given[i], described[i]));
        TORCH_CHECK_NOT_IMPLEMENTED(!op.hasTag(at::Tag::nondeterministic_seeded) || has_seed_, name(),
                                    " draws random numbers without a generator: the simulated device has no ",
                                    "kernel for it");
    }

    const char* name() const { return op_.schema().name().c_str(); }
    c10::Device device() const { return device_.value_or(c10::Device(kDeviceType, current_device_index())); }
    const c10::OperatorHandle& op() const { return op_; }

    // Calls the operator on tensors of `place`. Returns its results; `stack` are its arguments.
    Stack call(Place place, Stack* arguments = nullptr) const {
        Stack stack = arguments_on(place);
        if (arguments != nullptr) *arguments = stack;
        const Isolated isolated;
        op_.callBoxed(stack);
        return stack;
    }

    Stack arguments_on(Place place) const {
        Stack stack;
        for (const Argument& argument : arguments_) stack.push_back(put(argument, place));
        return stack;
    }

    // Calls it on the bytes of the device. Under the world's lock.
    Stack run() const {
        Stack arguments;
        Stack results = call(Place::host, &arguments);
        const Isolated isolated;
        for (size_t i = 0; i < arguments.size(); ++i) {
            // Some kernels resize what they write to, and back again: then it is not where it was.
            if (arguments_[i].kind != Argument::Kind::tensor || !is_written(i) || !arguments_[i].tensors[0])
                continue;
            const at::Tensor target = arguments_[i].tensors[0]->on_host(), written = arguments[i].toTensor();
            if (target.const_data_ptr() != written.const_data_ptr()) target.copy_(written);
        }
        return results;
    }

    // Number of the argument that result `i` is, if it is one.
    std::optional<size_t> argument_of_result(size_t i) const {
        const auto* const alias = op_.schema().returns()[i].alias_info();
        if (alias == nullptr) return std::nullopt;
        TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), name(),
                                    " makes a view: the simulated device has no kernel for it");
        const auto& described = op_.schema().arguments();
        for (size_t k = 0; k < described.size(); ++k) {
            const auto* const other = described[k].alias_info();
            if (other != nullptr && other->beforeSets() == alias->beforeSets()) return k;
        }
        TORCH_CHECK(false, name(), " returns what it was not given");
    }

    // Argument `i` has other memory now.
    void renew(size_t i, const at::Tensor& tensor) { arguments_[i].tensors = {Operand(tensor)}; }

    // True if the shapes of its results are not known before its arguments are.
    bool depends_on_values() const {
        if (op_.schema().name() == "aten::index") {  // Masks select as many as they do.
            const auto& indices = arguments_[1].tensors;
            return std::any_of(indices.begin(), indices.end(), [](const std::optional<Operand>& index) {
                return index && (index->dtype() == at::kBool || index->dtype() == at::kByte);
            });
        }
        return op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
    }

    // How long it takes in the mode "timed", in which it is pushed.
    double takes_us(const Speeds* speeds, size_t result_length) const {
        if (speeds == nullptr) return 0;
        size_t length = result_length;
        for (const Argument& argument : arguments_) {
            for (const auto& operand : argument.tensors) {
                if (operand && operand->is_on_device()) length += operand->span();
            }
        }
        return speeds->of_kernel_us(length, operations());
    }

    // True if results are given to it, whose shape it sets.
    bool has_out() const {
        const auto& described = op_.schema().arguments();
        for (size_t i = 0; i < described.size(); ++i) {
            if (described[i].kwarg_only() && is_written(i)) return true;
        }
        return false;
    }

    bool has_meta() const {
        return op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta) &&
               kOtherOnMeta.count(op_.schema().name()) == 0;
    }

  private:
    // Multiplications and additions of products of matrices; of other kernels the bytes say how long they
    // take.
    double operations() const {
        static const std::set<std::string> products = {"aten::mm", "aten::bmm", "aten::addmm",
                                                       "aten::baddbmm"};
        const std::string& called = op_.schema().name();
        if (products.count(called) == 0) return 0;
        const size_t first = called.find("add") == std::string::npos ? 0 : 1;
        const auto &one = arguments_[first].tensors[0], &other = arguments_[first + 1].tensors[0];
        return 2.0 * static_cast<double>(one->numel()) * static_cast<double>(other->columns());
    }

    bool is_written(size_t i) const {
        const auto* const alias = op_.schema().arguments()[i].alias_info();
        return alias != nullptr && alias->isWrite();
    }
    static c10::DeviceIndex current_device_index() { return static_cast<c10::DeviceIndex>(current_device()); }

    void find_device(const c10::IValue& value) {
        if (value.isTensor()) {
            find_device(value.toTensor());
        } else if (value.isTensorList()) {
            for (const at::Tensor& tensor : value.toTensorVector()) find_device(tensor);
        } else if (value.isOptionalTensorList()) {
            for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
                if (tensor) find_device(*tensor);
            }
        } else if (value.isDevice() && !device_) {
            device_ = value.toDevice();
        }
    }
    void find_device(const at::Tensor& tensor) {
        if (!tensor.defined() || tensor.device().type() != kDeviceType) return;
        TORCH_CHECK(!device_ || *device_ == tensor.device(),
                    "Expected all tensors to be on the same device, but found ", "at least two devices, ",
                    *device_, " and ", tensor.device(), "! (", name(), ")");
        device_ = tensor.device();
    }

    // As on CUDA: of the host are scalars only, and indices.
    std::optional<Operand> checked(const std::optional<at::Tensor>& tensor,
                                   const c10::Argument& described) const {
        if (tensor && tensor->defined() && tensor->is_cpu()) {
            const bool is_written = described.alias_info() != nullptr && described.alias_info()->isWrite();
            TORCH_CHECK((tensor->dim() == 0 || described.name() == "indices") && !is_written,
                        "Expected all tensors to be on the same device, but found at least two devices, ",
                        device(), " and cpu! (argument ", described.name(), " of ", name(), ")");
            return Operand::of_values(*tensor);
        }
        return operand_of(tensor);
    }

    Argument taken(const c10::IValue& value, const c10::Argument& described) {
        Argument argument;
        if (described.name() == "generator") {
            const at::Generator& generator =
                value.isGenerator() ? value.toGenerator() : default_generator(device().index());
            auto* const ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
            TORCH_CHECK(ours != nullptr, "Expected a '", device().type(),
                        "' device type for generator but found '", generator.device().type(), "'");
            argument.kind = Argument::Kind::seed;
            argument.seed = ours->next();
            has_seed_ = true;
        } else if (value.isTensor()) {
            argument.kind = Argument::Kind::tensor;
            argument.tensors.push_back(checked(value.toTensor(), described));
        } else if (value.isTensorList()) {
            argument.kind = Argument::Kind::list;
            for (const at::Tensor& tensor : value.toTensorVector()) {
                argument.tensors.push_back(checked(tensor, described));
            }
        } else if (value.isOptionalTensorList()) {
            argument.kind = Argument::Kind::optional_list;
            for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
                argument.tensors.push_back(checked(tensor, described));
            }
        } else {
            argument.value = value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value;
        }
        return argument;
    }

    c10::OperatorHandle op_;
    std::vector<Argument> arguments_;
    std::optional<c10::Device> device_;
    bool has_seed_ = false;
};

std::mutex g_waiting_mutex;
std::set<std::string> g_waiting;

// Calls the kernel without its arguments' values. Nothing if that cannot be done.
std::optional<Stack> call_without_values(const Kernel& kernel, Stack* arguments) {
    if (kernel.depends_on_values()) return std::nullopt;
    for (const Place place : {Place::meta, Place::zeros}) {
        if (place == Place::meta ? !kernel.has_meta() : kernel.has_out()) continue;
        try {
            return kernel.call(place, arguments);
        } catch (
            const std::exception&) {  // Of what is wrong with the arguments, the values' own call tells more.
            continue;
        }
    }
    return std::nullopt;
}

// The bytes of all that results of a kernel can depend on, but for values on the device.
class Key {
  public:
    explicit Key(const Kernel& kernel) {
        add(kernel.op().schema().name());
        add(kernel.op().schema().overload_name());
        add_bytes(c10::get_default_dtype_as_scalartype());
        for (const c10::IValue& argument : kernel.arguments_on(Place::meta)) add(argument);
    }

    // Nothing where an argument is of a kind that has no bytes here.
    std::optional<std::string> bytes() const { return is_whole_ ? std::optional(bytes_) : std::nullopt; }

  private:
    template <typename Value>
    void add_bytes(const Value& value) {
        static_assert(std::is_trivially_copyable_v<Value>);
        bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    void add(const std::string& text) {
        add_bytes(text.size());
        bytes_ += text;
    }
    void add(c10::IntArrayRef values) {
        add_bytes(values.size());
        for (const int64_t value : values) add_bytes(value);
    }

    void add(const at::Tensor& tensor) {
        add_bytes(tensor.defined());
        if (!tensor.defined()) return;
        add(tensor.sizes());
        add(tensor.strides());
        add_bytes(tensor.scalar_type());
        add_bytes(tensor.is_conj());
        add_bytes(tensor.is_neg());
        add_bytes(tensor.is_cpu());
        if (!tensor.is_cpu()) return;  // Else a number.
        add_bytes(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        bytes_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.element_size());
    }

    void add(const c10::IValue& value) {
        add(value.tagKind());
        if (value.isTensor()) {
            add(value.toTensor());
        } else if (value.isTensorList()) {
            const auto tensors = value.toTensorVector();
            add_bytes(tensors.size());
            for (const at::Tensor& tensor : tensors) add(tensor);
        } else if (value.isInt()) {
            add_bytes(value.toInt());
        } else if (value.isDouble()) {
            add_bytes(value.toDouble());
        } else if (value.isBool()) {
            add_bytes(value.toBool());
        } else if (value.isIntList()) {
            const std::vector<int64_t> values = value.toIntVector();
            add(c10::IntArrayRef(values));
        } else if (!value.isNone() && !value.isDevice()) {  // The device is the host's.
            is_whole_ = false;
        }
    }

    std::string bytes_;
    bool is_whole_ = true;
};

// What a call without values has found.
struct Inferred {
    Stack results;                                           // without bytes
    std::vector<std::optional<std::vector<int64_t>>> sizes;  // of the arguments that are written
};

c10::IValue without_bytes(const c10::IValue& value) {
    const auto layout_of = [](const at::Tensor& tensor) {
        return tensor.defined()
                   ? at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type())
                   : at::Tensor();
    };
    if (value.isTensor()) return layout_of(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(layout_of(tensor));
    return list;
}

std::shared_ptr<const Inferred> call_for_layouts(const Kernel& kernel) {
    Stack arguments;
    const std::optional<Stack> results = call_without_values(kernel, &arguments);
    if (!results) return nullptr;
    auto inferred = std::make_shared<Inferred>();
    for (const c10::IValue& result : *results) inferred->results.push_back(without_bytes(result));
    const auto& described = kernel.op().schema().arguments();
    for (size_t i = 0; i < described.size(); ++i) {
        const bool is_written = described[i].alias_info() != nullptr && arguments[i].isTensor();
        const at::Tensor tensor = is_written ? arguments[i].toTensor() : at::Tensor();
        inferred->sizes.push_back(tensor.defined() ? std::optional(tensor.sizes().vec()) : std::nullopt);
    }
    return inferred;
}

// The same, asked once for equal arguments: torch infers most of it in Python, which would take half of the
// time of the tests. `put_values` refuses results that are others than was found.
std::shared_ptr<const Inferred> layouts_of(const Kernel& kernel) {
    constexpr size_t kMost = 1 << 16;
    static std::mutex mutex;
    static auto& known = *new std::unordered_map<std::string, std::shared_ptr<const Inferred>>();
    const std::optional<std::string> key = Key(kernel).bytes();
    if (!key) return call_for_layouts(kernel);
    {
        const std::lock_guard lock(mutex);
        if (const auto found = known.find(*key); found != known.end()) return found->second;
    }
    auto inferred = call_for_layouts(kernel);
    const std::lock_guard lock(mutex);
    if (known.size() == kMost) known.clear();
    if (inferred) known.emplace(*key, inferred);
    return inferred;
}

// Finds the shapes of the results; nothing if that takes values. Written arguments are resized, where the
// kernel does it.
std::optional<Stack> infer(Kernel& kernel, c10::ArrayRef<c10::IValue> given) {
    const auto inferred = layouts_of(kernel);
    if (!inferred) return std::nullopt;
    for (size_t i = 0; i < given.size(); ++i) {
        if (!inferred->sizes[i] || !given[i].isTensor()) continue;
        const at::Tensor tensor = given[i].toTensor();
        if (tensor.defined() && tensor.sizes() != *inferred->sizes[i]) {
            tensor.resize_(*inferred->sizes[i]);
            kernel.renew(i, tensor);
        }
    }
    return inferred->results;
}

at::Tensor empty_like_on(c10::Device device, const at::Tensor& tensor) {
    if (!tensor.defined()) return {};
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

using Targets = std::vector<std::vector<std::optional<Operand>>>;

void push_kernel(const Kernel& kernel, const Targets& targets, std::function<void()> work) {
    size_t length = 0;
    for (const auto& tensors : targets) {
        for (const auto& tensor : tensors) length += tensor ? tensor->span() : 0;
    }
    const Entered world;
    const double takes_us = kernel.takes_us(world->scheduler.speeds(), length);
    world->scheduler.push(current_stream(kernel.device().index()),
                          {std::move(work), {}, {}, takes_us, kernel.name(), Engine::kernels});
    world->memory.reap();
}

// Makes tensors on the device for those among `results` that the kernel makes; the others are arguments. Also
// returns where the values of each are to be put.
Stack make_results(const Kernel& kernel, c10::ArrayRef<c10::IValue> given, const Stack& results,
                   Targets* targets) {
    Stack made;
    targets->resize(results.size());
    for (size_t i = 0; i < results.size(); ++i) {
        if (const auto argument = kernel.argument_of_result(i)) {
            made.push_back(given[*argument]);
        } else if (results[i].isTensor()) {
            const at::Tensor tensor = empty_like_on(kernel.device(), results[i].toTensor());
            (*targets)[i].push_back(operand_of(tensor));
            made.push_back(tensor);
        } else if (results[i].isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& result : results[i].toTensorVector()) {
                list.push_back(empty_like_on(kernel.device(), result));
                (*targets)[i].push_back(operand_of(list.get(list.size() - 1)));
            }
            made.push_back(list);
        } else {
            made.push_back(results[i]);
        }
    }
    return made;
}

void put_values(const Targets& targets, const Stack& results) {
    const Isolated isolated;
    for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].empty()) continue;
        const auto values =
            results[i].isTensor() ? std::vector{results[i].toTensor()} : results[i].toTensorVector();
        for (size_t k = 0; k < values.size(); ++k) {
            if (!targets[i][k] || !values[k].defined()) continue;  // What an output mask leaves out.
            const at::Tensor target = targets[i][k]->on_host();
            TORCH_CHECK(
                target.sizes() == values[k].sizes() && target.scalar_type() == values[k].scalar_type(),
                "a result is ", values[k].scalar_type(), values[k].sizes(), " and not ", target.scalar_type(),
                target.sizes());
            target.copy_(values[k]);
        }
    }
}

}  // namespace

Operand::Operand(const at::Tensor& tensor)
    : sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      dtype_(tensor.scalar_type()),
      on_device_(tensor.device().type() == kDeviceType),
      is_conj_(tensor.is_conj()),
      is_negative_(tensor.is_neg()) {
    if (tensor.numel() == 0) return;
    address_ = const_cast<void*>(tensor.const_data_ptr());
    int64_t last = 0;
    for (size_t i = 0; i < sizes_.size(); ++i) last += (sizes_[i] - 1) * strides_[i];
    span_ = static_cast<size_t>(last + 1) * tensor.element_size();
}

Operand Operand::of_values(const at::Tensor& tensor) {
    const at::Tensor values = tensor.detach().clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        values.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    Operand operand(values);
    operand.values_ = values;
    return operand;
}

at::Tensor Operand::on_host() const {
    if (values_) return *values_;
    const auto options = at::TensorOptions().dtype(dtype_);
    if (span_ == 0) return at::empty_strided(sizes_, strides_, options);
    void* const bytes = on_device_ ? device_bytes(address_) : address_;
    const at::Tensor tensor = at::for_blob(bytes, sizes_)
                                  .strides(strides_)
                                  .options(options)
                                  .resizeable_storage()
                                  .allocator(c10::GetAllocator(c10::kCPU))
                                  .make_tensor();
    if (is_conj_) tensor._set_conj(true);
    if (is_negative_) tensor._set_neg(true);
    return tensor;
}

at::Tensor Operand::on_meta() const {
    if (values_ && values_->dim() == 0) return *values_;
    const at::Tensor tensor = at::detail::empty_strided_meta(sizes_, strides_, dtype_);
    if (is_conj_) tensor._set_conj(true);
    if (is_negative_) tensor._set_neg(true);
    return tensor;
}

at::Tensor Operand::as_zeros() const {
    if (values_ && values_->dim() == 0) return *values_;
    const auto options = at::TensorOptions().dtype(dtype_);
    const auto numel = static_cast<int64_t>(span_ / c10::elementSize(dtype_));
    if (numel == 0) return at::empty_strided(sizes_, strides_, options);
    return at::zeros({numel}, options).as_strided(sizes_, strides_);
}

void start_kernel(const c10::OperatorHandle& op, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const auto given = torch::jit::last(*stack, count);
    auto kernel = std::make_shared<Kernel>(op, given);
    const c10::DeviceGuard guard(kernel->device());
    std::optional<Stack> inferred = infer(*kernel, given);
    Targets targets;
    Stack made;
    if (inferred) {
        made = make_results(*kernel, given, *inferred, &targets);
        push_kernel(*kernel, targets, [kernel, targets] { put_values(targets, kernel->run()); });
    } else {
        // As on CUDA: the host waits for values that it needs. What is computed comes late again.
        Stack results;
        {
            const Entered world;
            world->scheduler.wait(world->scheduler.mark(current_stream(kernel->device().index())));
            world->memory.reap();
            raise_failure(*world);
            results = kernel->run();
        }
        if (!kernel->depends_on_values()) {
            const std::lock_guard lock(g_waiting_mutex);
            g_waiting.insert(kernel->name());
        }
        made = make_results(*kernel, given, results, &targets);
        push_kernel(*kernel, targets, [kernel, targets, results] { put_values(targets, results); });
    }
    torch::jit::drop(*stack, count);
    for (c10::IValue& result : made) stack->push_back(std::move(result));
}

at::Tensor start_copy(const at::Tensor& given, const at::Tensor& destination, bool non_blocking) {
    if (destination.numel() == 0) return destination;
    at::Tensor source = given.sizes() == destination.sizes() ? given : given.expand(destination.sizes());
    const bool is_same = source.scalar_type() == destination.scalar_type() &&
                         source.is_conj() == destination.is_conj() && source.is_neg() == destination.is_neg();
    // One transfer; else one side makes a temporary.
    const bool is_flat =
        is_same && source.strides() == destination.strides() && source.is_non_overlapping_and_dense();
    const auto is_locked = [](const at::Tensor& tensor) {
        return Entered()->host.is_locked(tensor.const_data_ptr());
    };
    const c10::Device device = source.is_cpu() ? destination.device() : source.device();
    const int stream = current_stream(index_of(device));
    const Operand to(destination);
    at::Tensor staged;  // what is not page-locked is read by the driver at once
    if (source.is_cpu() && !(non_blocking && is_flat && is_locked(source))) staged = source = source.clone();
    const Operand from(source);
    HostRange host;
    if (source.is_cpu() && !staged.defined()) host = {static_cast<const char*>(from.address()), from.span()};
    if (destination.is_cpu()) host = {static_cast<const char*>(to.address()), to.span()};
    const bool is_late_to_host = non_blocking && (is_flat || destination.is_contiguous()) &&
                                 destination.is_cpu() && is_locked(destination);
    const auto work = [to, from, staged, is_flat] {
        const at::Tensor values = from.on_host(), target = to.on_host();
        if (is_flat) {
            std::memcpy(target.mutable_data_ptr(), values.const_data_ptr(), from.span());
            return;
        }
        const Isolated isolated;
        target.copy_(values);
    };
    const Entered world;
    Scheduler& scheduler = world->scheduler;
    if (destination.device().type() == kDeviceType && source.device().type() == kDeviceType &&
        destination.device() != source.device()) {
        // As CUDA: it waits for the current stream of the other device, which waits for it.
        const int other = current_stream(index_of(destination.device()));
        scheduler.push(stream, {{}, scheduler.mark(other), {}, 0, "wait"});
        scheduler.push(stream, {work, {}, {}, 0, "copy"});  // Takes no time: nothing that is timed makes one.
        scheduler.push(other, {{}, scheduler.mark(stream), {}, 0, "wait"});
        return destination;
    }
    const Engine engine = source.is_cpu()        ? Engine::up
                          : destination.is_cpu() ? Engine::down
                                                 : Engine::kernels;
    const Speeds* const speeds = scheduler.speeds();
    const double takes_us = speeds == nullptr ? 0 : speeds->of_copy_us(engine, from.span());
    scheduler.push(stream, {work, {}, host, takes_us, "copy", engine});
    const bool is_waited_for =
        (destination.is_cpu() && !is_late_to_host) || (source.is_cpu() && !non_blocking);
    if (is_waited_for) scheduler.wait(scheduler.mark(stream));
    world->memory.reap();
    if (is_waited_for) raise_failure(*world);
    return destination;
}

std::vector<std::string> waiting_operators() {
    const std::lock_guard lock(g_waiting_mutex);
    return {g_waiting.begin(), g_waiting.end()};
}

}  // namespace sim
