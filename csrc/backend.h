// What the engine asks of the operating system, and the systems that can give it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "request.h"

namespace swapper {

// Memory that is registered with the kernel as one buffer; its index is its place in the list.
struct Piece {
    char* data = nullptr;
    uint64_t length = 0;  // at most kPieceBytes
};
constexpr uint64_t kPieceBytes = uint64_t{1} << 30;  // the most that io_uring takes as one buffer

// Moves requests to the kernel and completions back, and decides nothing.
//
// One thread, the one that constructs it, makes all calls but `wake`. At most `queue_depth` requests, the
// number given at construction, are ever between `submit` and their completion.
class Backend {
  public:
    virtual ~Backend() = default;  // in-flight requests have been reaped, unless a call threw

    // Starts requests in order. Returns how many were taken, from the front: fewer than `count`, even 0,
    // where the kernel has no room now. A request that the kernel refuses counts as taken, and its completion
    // carries the error. Throws IoError only where the backend itself is broken.
    virtual size_t submit(Request* const* requests, size_t count) = 0;

    // Stores up to `capacity` completions and returns their number. With `block`, waits until there is one,
    // or until `wake`; may return 0 for no reason, so the caller loops.
    virtual size_t reap(Completion* completions, size_t capacity, bool block) = 0;

    // Makes the current blocking `reap`, or else the next one, return. From any thread.
    virtual void wake() = 0;

    // Replaces the registered pieces. Called with nothing in flight. Returns 0, or an errno: then none is
    // registered. Backends without registration return EOPNOTSUPP for a list that is not empty.
    virtual int set_pieces(const std::vector<Piece>& pieces) = 0;
};

enum class BackendKind : uint8_t { kThreads, kAio, kUring, kCuFile };

// Each throws IoError where the system does not offer it; `detail` then holds the likely cause.
std::unique_ptr<Backend> make_threads_backend(uint32_t queue_depth);
std::unique_ptr<Backend> make_aio_backend(uint32_t queue_depth);
std::unique_ptr<Backend> make_uring_backend(uint32_t queue_depth);
std::unique_ptr<Backend> make_cufile_backend(uint32_t queue_depth);  // device memory only

}  // namespace swapper
