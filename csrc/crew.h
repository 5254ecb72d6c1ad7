// Threads of our own, which sleep until there is work.
#pragma once

#include <cstddef>
#include <functional>

namespace swapper {

// Calls `work` on up to `threads` threads, this one among them, and returns when all calls have returned. A
// thread that wakes when this one is done already does not call it, so `work` takes its share of what is left
// until nothing is. `work` must not throw. On all of them floats are rounded, and denormals kept or flushed,
// as on this one.
//
// The threads are of the process and stay; they sleep in the kernel, so that no setting of OpenMP's matters
// to them. Where they are busy for another thread, or none can be made, this one does all. After a fork the
// child makes its own.
void run_on_crew(std::size_t threads, const std::function<void()>& work);

}  // namespace swapper
