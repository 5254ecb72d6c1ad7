// Memory that is about to be filled, made present by several threads.

#pragma once

#include <cstddef>

namespace swapper {

// Lets the kernel make the pages of `length` bytes at `data` present and writable, as if each had been
// written to; their content stays. Up to `threads` threads share the work. Only a hint: where the kernel
// cannot do it (before Linux 5.14, or out of memory), the pages come when they are touched.
void prefault(void* data, std::size_t length, unsigned threads);

}  // namespace swapper
