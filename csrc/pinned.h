// Memory that transfers read and write: allocated once, kept in memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace swapper {

// One contiguous private mapping, aligned to 2 MiB and of huge pages where they are to be had; to a page if
// it is smaller than that. Every page is there when the constructor returns, and locked where RLIMIT_MEMLOCK
// allows. Not inherited by a forked child (MADV_DONTFORK): a copy-on-write fault in the parent while the
// kernel reads into a page would send the data to the child's copy. So in a child the memory must not be
// touched, and the destructor does nothing.
class Slab {
  public:
    static constexpr uint64_t kAlignment = uint64_t{2} << 20;

    // `length` > 0 bytes. Throws IoError where the memory is not to be had.
    explicit Slab(uint64_t length);
    ~Slab();
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    char* data() const { return data_; }
    uint64_t length() const { return length_; }
    bool locked() const { return lock_refusal_.empty(); }
    const std::string& lock_refusal() const { return lock_refusal_; }
    // Lets the system page it out, and RLIMIT_MEMLOCK count it no more; the memory stays. Not thread-safe.
    // Does nothing in a child.
    void unlock();
    bool in_owner_process() const;

  private:
    char* data_ = nullptr;
    uint64_t length_ = 0;
    uint64_t mapped_ = 0;
    pid_t owner_ = 0;
    std::string lock_refusal_;
};

}  // namespace swapper
