// Sparse tensors: their indices and values are tensors of the device. What is computed with them waits for
// the host, which computes: gradients of embeddings come from nothing that is late.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

#include "backend.h"

namespace sim {
namespace {

at::Tensor moved(const at::Tensor& tensor, c10::Device device) {
    if (!tensor.defined() || !tensor.is_sparse()) return tensor.defined() ? tensor.to(device) : tensor;
    return at::_sparse_coo_tensor_unsafe(tensor._indices().to(device), tensor._values().to(device),
                                         tensor.sizes(), tensor.options().device(device),
                                         tensor.is_coalesced());
}

void put_back(const at::Tensor& tensor, const at::Tensor& result) {
    if (!tensor.is_sparse()) {
        tensor.copy_(result);
        return;
    }
    at::sparse::get_sparse_impl(tensor)->raw_resize_(result.sparse_dim(), result.dense_dim(), result.sizes());
    at::sparse::alias_into_sparse(tensor, result._indices().to(tensor.device()),
                                  result._values().to(tensor.device()));
    tensor._coalesced_(result.is_coalesced());
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& described = op.schema().arguments();
    const auto last = torch::jit::last(*stack, described.size());
    const std::vector<c10::IValue> given(last.begin(), last.end());
    torch::jit::Stack values;
    std::optional<c10::Device> device;
    for (const c10::IValue& value : given) {
        TORCH_CHECK_NOT_IMPLEMENTED(!value.isTensorList() && !value.isOptionalTensorList(),
                                    op.schema().name(),
                                    ": the simulated device takes no lists of sparse tensors");
        if (value.isTensor() && value.toTensor().defined() &&
            value.toTensor().device().type() == kDeviceType) {
            device = value.toTensor().device();
            values.emplace_back(moved(value.toTensor(), c10::kCPU));
        } else {
            values.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value);
        }
    }
    const torch::jit::Stack arguments = values;
    op.callBoxed(values);
    for (size_t i = 0; i < described.size(); ++i) {
        const auto* const alias = described[i].alias_info();
        if (alias != nullptr && alias->isWrite()) put_back(given[i].toTensor(), arguments[i].toTensor());
    }
    torch::jit::drop(*stack, described.size());
    for (size_t i = 0; i < values.size(); ++i) {
        size_t same = 0;
        const auto* const alias = op.schema().returns()[i].alias_info();
        while (alias != nullptr && same < described.size() &&
               (described[same].alias_info() == nullptr ||
                described[same].alias_info()->beforeSets() != alias->beforeSets())) {
            ++same;
        }
        if (alias != nullptr && same < described.size()) {
            stack->push_back(given[same]);
        } else if (values[i].isTensor()) {
            stack->emplace_back(moved(values[i].toTensor(), device.value_or(c10::Device(kDeviceType))));
        } else {
            stack->push_back(values[i]);
        }
    }
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
    m.impl("empty.memory_format", at::native::empty_sparse_symint);
    m.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
    m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
    m.impl("clone", at::native::clone_sparse);
    m.impl("sparse_dim", at::native::sparse_dim_sparse);
    m.impl("dense_dim", at::native::dense_dim_sparse);
    m.impl("_nnz", at::native::_nnz_sparse);
    m.impl("is_coalesced", at::native::is_coalesced_sparse);
    m.impl("_coalesced_", at::native::_coalesced_sparse_);
    m.impl("_indices", at::native::_indices_sparse);
    m.impl("_values", at::native::_values_sparse);
    m.impl("indices", at::native::indices_sparse);
    m.impl("values", at::native::values_sparse);
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace
}  // namespace sim
