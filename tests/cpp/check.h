// What the tests of the native core share. Each test_*.cpp is a program; see the Makefile.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "file.h"

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                               \
        }                                                                               \
    } while (false)

// A failure of type `Error`, and no other, is what `statement` must end in.
#define CHECK_THROWS(Error, statement) \
    do {                               \
        bool thrown = false;           \
        try {                          \
            (void)(statement);         \
        } catch (const Error&) {       \
            thrown = true;             \
        }                              \
        CHECK(thrown);                 \
    } while (false)

// Bytes on the heap, `misalignment` bytes into their memory; they end where it ends.
class Array {
  public:
    explicit Array(size_t length, size_t misalignment = 0)
        : length_(length),
          memory_(new unsigned char[misalignment + length]),
          data_(memory_.get() + misalignment) {}
    unsigned char* data() const { return data_; }
    bool operator==(const Array& other) const {
        return length_ == other.length_ && std::memcmp(data_, other.data_, length_) == 0;
    }

  private:
    size_t length_;
    std::unique_ptr<unsigned char[]> memory_;
    unsigned char* data_;
};

// In the working directory, so that it is on a file system of the caller's choice.
class TemporaryDirectory {
  public:
    TemporaryDirectory() {
        char name[] = "./native_test.XXXXXX";
        CHECK(::mkdtemp(name) != nullptr);
        path_ = name;
    }
    ~TemporaryDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

    std::string operator/(const std::string& name) const { return path_ + "/" + name; }

  private:
    std::string path_;
};

inline std::shared_ptr<swapper::File> open_file(const std::string& path, bool direct = true) {
    swapper::OpenOptions options;
    options.access = swapper::Access::kReadWrite;
    options.create = true;
    options.direct = direct;
    return std::make_shared<swapper::File>(path, options);
}

inline void fill(char* data, uint64_t length, uint64_t seed) {
    std::mt19937_64 random(seed);
    for (uint64_t i = 0; i < length; ++i) data[i] = static_cast<char>(random());
}
