// One request to the operating system.
#pragma once

#include <cstdint>

namespace swapper {

struct DeviceTarget;  // see cufile.h

enum class Operation : uint8_t { kRead, kWrite };

inline const char* name_of(Operation operation) {
    return operation == Operation::kRead ? "read" : "write";
}

// Owned by the engine; backends store its address as user data, so it may not move or change between
// `submit` and the completion that returns it.
struct Request {
    Operation operation = Operation::kRead;
    int fd = -1;
    char* data = nullptr;
    uint32_t length = 0;  // at most 1 GiB
    uint64_t offset = 0;
    int buffer_index = -1;  // the registered piece that holds all of `data`, -1 for none
    const DeviceTarget* device =
        nullptr;  // for cuFile: `data` is device memory, not to be touched, `fd` unused
};

struct Completion {
    Request* request = nullptr;
    int64_t result = 0;  // bytes moved, or -errno, or below -kCuFileErrors: see cufile.h
};

}  // namespace swapper
