// The square root that torch calls on x86: its vendor's, of the library that torch is linked with. It is not
// the nearest float everywhere, so that only this function has the bits of torch's.
#pragma once

#include <cstddef>

namespace swapper {

// False where torch is not loaded, or its library has none. The first call decides.
bool has_vendor_sqrt();

// The root of each element of a, to out: the same array, or one that does not overlap it. has_vendor_sqrt()
// must be true, and a VendorOnOneThread live on this thread.
void vendor_sqrt(const float* a, float* out, std::size_t numel);

// While it lives, the vendor's library uses no other thread for what this thread asks of it: to wake one
// takes many times as long as a tile. Does nothing where there is no vendor's root.
class VendorOnOneThread {
  public:
    VendorOnOneThread();
    ~VendorOnOneThread();
    VendorOnOneThread(const VendorOnOneThread&) = delete;
    VendorOnOneThread& operator=(const VendorOnOneThread&) = delete;

  private:
    int before_ = 0;
};

}  // namespace swapper
