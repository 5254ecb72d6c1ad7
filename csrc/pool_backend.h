// A backend over calls that block: a few threads, each in one of them.
#pragma once

#include <cstdint>
#include <memory>

#include "backend.h"

namespace swapper {

// Carries out one request, blocking, from any thread. Returns what `Completion::result` is to be.
using Perform = int64_t (*)(const Request&);

// Throws IoError where no thread can be started.
std::unique_ptr<Backend> make_pool_backend(uint32_t queue_depth, Perform perform);

}  // namespace swapper
