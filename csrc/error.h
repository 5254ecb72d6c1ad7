// Failures of the operating system, with everything needed to explain them.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace swapper {

// A file operation, transfer or allocation failed. `offset` and `length` are bytes, -1 where they have no
// meaning; `detail` is one more sentence for the message. Becomes `swapper.errors.SwapIOError` in Python.
class IoError : public std::runtime_error {
  public:
    IoError(int error, std::string operation_, std::string path_ = "", int64_t offset_ = -1,
            int64_t length_ = -1, std::string detail_ = "")
        : std::runtime_error(operation_ + " failed: " + std::strerror(error)),
          code(error),
          operation(std::move(operation_)),
          path(std::move(path_)),
          offset(offset_),
          length(length_),
          detail(std::move(detail_)) {}

    int code;
    std::string operation;
    std::string path;
    int64_t offset;
    int64_t length;
    std::string detail;
};

// A use that cannot work in this process or state: after a fork, or after close. Becomes `SwapError`.
class StateError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace swapper
