// Memory that is about to be filled, made present before that.

#pragma once

#include <cstddef>

namespace swapper {

// Lets the kernel make the pages of `length` bytes at `data` present and writable, as if each had been
// written to; their content stays. Only a hint: where the kernel cannot do it (before Linux 5.14, or out of
// memory), the pages come when they are touched. Up to `threads` threads share the work.
void prefault(void* data, std::size_t length, unsigned threads);

// The same on this thread, with huge pages where they fit.
void prefault_huge(void* data, std::size_t length);

}  // namespace swapper
