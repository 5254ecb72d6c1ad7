// pread and pwrite on a few threads: works on every system and every file system.
#include <unistd.h>

#include <cerrno>

#include "pool_backend.h"

namespace swapper {
namespace {

int64_t perform(const Request& request) {
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t moved = request.operation == Operation::kRead
                              ? ::pread(request.fd, request.data, request.length, offset)
                              : ::pwrite(request.fd, request.data, request.length, offset);
    return moved >= 0 ? moved : -errno;
}

}  // namespace

std::unique_ptr<Backend> make_threads_backend(uint32_t queue_depth) {
    return make_pool_backend(queue_depth, perform);
}

}  // namespace swapper
