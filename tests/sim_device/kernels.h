// Kernels: torch's own for the CPU, run on the bytes of device memory when their stream gets to them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

namespace sim {

// What a kernel is told of a tensor when it is started. As on a GPU, that is an address and a layout: it
// keeps no memory alive, and the values are those of the moment it runs.
class Operand {
  public:
    explicit Operand(const at::Tensor& tensor);
    // Of the host, with the values of now.
    static Operand of_values(const at::Tensor& tensor);

    // The tensor over its bytes, wherever they are. Not before the kernel runs; under the world's lock.
    at::Tensor on_host() const;
    // The same without values, and with zeros on the host.
    at::Tensor on_meta() const;
    at::Tensor as_zeros() const;

    bool is_on_device() const { return on_device_; }
    const void* address() const { return address_; }
    c10::ScalarType dtype() const { return dtype_; }
    int64_t numel() const { return c10::multiply_integers(sizes_); }
    int64_t columns() const { return sizes_.empty() ? 1 : sizes_.back(); }
    size_t span() const { return span_; }  // bytes from the first element to the end of the last

  private:
    void* address_ = nullptr;
    std::vector<int64_t> sizes_, strides_;
    c10::ScalarType dtype_;
    bool on_device_, is_conj_, is_negative_;
    size_t span_ = 0;
    std::optional<at::Tensor> values_;
};

// Starts `op`, which has a kernel for the CPU, on what is on `stack`, and puts its results there.
void start_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Starts `destination.copy_(source)`, one of them on the device. Waits for it where CUDA would.
at::Tensor start_copy(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);

// Names of the operators that had to wait for their stream to know the shapes of their results.
std::vector<std::string> waiting_operators();

}  // namespace sim
