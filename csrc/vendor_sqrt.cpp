#include "vendor_sqrt.h"

#include <dlfcn.h>

#include <cstdint>

namespace swapper {
namespace {

struct Vendor {
    // As Fortran calls it: everything by address. The count has 32 or 64 bits: on x86 an int64_t is read as
    // either.
    void (*sqrt)(const std::int64_t* numel, const float* a, float* out, const std::int64_t* mode) = nullptr;
    // Of this thread's calls; 0: as for the process. Returns what it was.
    int (*set_threads)(int count) = nullptr;
};

// As torch has it: high accuracy, denormals as they are, errors ignored.
constexpr std::int64_t kMode = 0x2 | 0x00140000 | 0x100;

Vendor find() {
    Vendor found;
#if defined(__x86_64__)
    // Of torch's own, which stays loaded, and of what that is linked with; never loaded by us.
    if (void* const torch = ::dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD)) {
        found.sqrt = reinterpret_cast<decltype(found.sqrt)>(::dlsym(torch, "VMSSQRT_"));
        found.set_threads =
            reinterpret_cast<decltype(found.set_threads)>(::dlsym(torch, "MKL_Set_Num_Threads_Local"));
    }
#endif
    return found.sqrt != nullptr && found.set_threads != nullptr ? found : Vendor{};
}

const Vendor& vendor() {
    static const Vendor found = find();
    return found;
}

}  // namespace

bool has_vendor_sqrt() {
    return vendor().sqrt != nullptr;
}

void vendor_sqrt(const float* a, float* out, std::size_t numel) {
    const auto count = static_cast<std::int64_t>(numel);
    vendor().sqrt(&count, a, out, &kMode);
}

VendorOnOneThread::VendorOnOneThread() {
    if (has_vendor_sqrt()) before_ = vendor().set_threads(1);
}

VendorOnOneThread::~VendorOnOneThread() {
    if (has_vendor_sqrt()) vendor().set_threads(before_);
}

}  // namespace swapper
