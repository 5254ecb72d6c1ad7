// The device as torch sees it: allocators, streams, events, random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace sim {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

// Index of a device, which may be the current one.
int index_of(c10::Device device);

// As on CUDA, a generator is a seed and a count of the kernels that used it. What a kernel draws is set when
// it is started, however late it runs.
class Generator final : public c10::GeneratorImpl {
  public:
    explicit Generator(int device, uint64_t seed = c10::detail::getNonDeterministicRandom(),
                       uint64_t offset = 0);

    void set_current_seed(uint64_t seed) override;
    uint64_t current_seed() const override { return seed_; }
    uint64_t seed() override;
    void set_offset(uint64_t offset) override { offset_ = offset; }
    uint64_t get_offset() const override { return offset_; }
    void set_state(const c10::TensorImpl& state) override;
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

    uint64_t next();  // seed of what the next kernel draws from

  private:
    Generator* clone_impl() const override;

    uint64_t seed_, offset_;
};

const at::Generator& default_generator(int device);

}  // namespace sim
