// cuFile's blocking calls on a few threads. Requests carry all they need: see `DeviceTarget`.
#include "cufile.h"
#include "pool_backend.h"

namespace swapper {
namespace {

int64_t perform(const Request& request) {
    return request.device->file->move(request);
}

}  // namespace

std::unique_ptr<Backend> make_cufile_backend(uint32_t queue_depth) {
    return make_pool_backend(queue_depth, perform);
}

}  // namespace swapper
