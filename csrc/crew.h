// Threads of our own, which sleep until there is work.
#pragma once

#include <sys/types.h>

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

// The same in two parts: the other threads work while this one does something else, and it works with them
// when it waits. With `threads` 1 one other works, or this one in its place if that has not begun. A thread
// has one of these at a time.
class CrewWork {
  public:
    CrewWork(std::size_t threads, std::function<void()> work);  // Returns at once.
    ~CrewWork();                                                // Waits.
    CrewWork(const CrewWork&) = delete;
    CrewWork& operator=(const CrewWork&) = delete;

    // Returns when all calls have returned. In a child that was forked since: at once. Idempotent.
    void wait();

  private:
    const std::function<void()> work_;
    const bool joins_;
    const bool is_begun_;
    const pid_t owner_;
    bool is_ended_ = false;
};

}  // namespace swapper
