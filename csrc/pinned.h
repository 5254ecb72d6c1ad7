// Memory that transfers read and write: its addresses are reserved once, and what is ready of it stays in
// memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace swapper {

// One contiguous private mapping, aligned to 2 MiB and of huge pages where they are to be had; to a page if
// it is smaller than that. Its first `ready` bytes are in memory, locked where RLIMIT_MEMLOCK allows; the
// rest are addresses only. Not inherited by a forked child (MADV_DONTFORK): a copy-on-write fault in the
// parent while the kernel reads into a page would send the data to the child's copy. So in a child the memory
// must not be touched, and the destructor does nothing.
class Slab {
  public:
    static constexpr uint64_t kAlignment = uint64_t{2} << 20;

    // `length` > 0 bytes, of which the first `ready` are made ready. Throws IoError where the memory is not
    // to be had.
    Slab(uint64_t length, uint64_t ready);
    explicit Slab(uint64_t length) : Slab(length, length) {}
    ~Slab();
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    char* data() const { return data_; }
    uint64_t length() const { return length_; }
    uint64_t ready() const { return ready_; }
    // Makes at least the first `ready` bytes ready. What was ready stays as it is. Throws IoError where the
    // memory is not to be had: then `ready()` is what it was. Not thread-safe.
    void extend(uint64_t ready);
    // Gives back the memory beyond the first `ready` bytes, which nobody may use any more: no transfer, and
    // no registration with an engine or a device. Does nothing in a child. Not thread-safe.
    void shrink(uint64_t ready);
    bool locked() const { return lock_refusal_.empty(); }
    const std::string& lock_refusal() const { return lock_refusal_; }
    // Lets the system page it out, and RLIMIT_MEMLOCK count it no more; the memory stays. Not thread-safe.
    // Does nothing in a child.
    void unlock();
    bool in_owner_process() const;

  private:
    uint64_t round_up(uint64_t length) const;

    char* data_ = nullptr;
    uint64_t length_ = 0;
    uint64_t alignment_ = 0;  // of the mapping, and of what is ready of it
    uint64_t mapped_ = 0;
    uint64_t ready_ = 0;  // at most `length_`
    pid_t owner_ = 0;
    std::string lock_refusal_;
};

}  // namespace swapper
