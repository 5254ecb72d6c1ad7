// NVIDIA's cuFile (GPUDirect Storage), found at run time: no header, no library at build time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "file.h"
#include "request.h"

namespace swapper {

// Results of cuFile's calls above this are its own errors, those below are an errno.
constexpr int kCuFileErrors = 5000;

// "cuFile error 5008: GPUDirect Storage is not supported on this file"
std::string cufile_error_text(int error);
// EOPNOTSUPP for an error that says that cuFile cannot do this here, with this file or this memory, so that
// another way may; EALREADY for a file that is registered already; EIO for all others.
int cufile_errno(int error);

// The library. Loaded once for each file that holds one, and never unloaded; its driver session, once open,
// ends with the process (cuFile sees to that): others in this process may share it. Thread-safe. It does not
// work in a forked child: `load` throws there, and registrations are destroyed without a call.
//
// `device`: CUDA ordinal whose primary context, the one that torch uses, is current during the call, as
// cuFile asks. Negative for memory of no CUDA device: none is then needed.
class CuFile {
  public:
    struct Properties {
        unsigned nvfs_major = 0;  // version of the nvidia-fs kernel module
        unsigned nvfs_minor = 0;
        unsigned status_flags = 0;   // bit k: file systems of kind k are supported
        unsigned control_flags = 0;  // bit 1: the compatibility mode is allowed
    };

    // Tries file names in order, as for dlopen. Throws IoError, with a reason for each, if none will do.
    static std::shared_ptr<const CuFile> load(const std::vector<std::string>& names);

    const std::string& path() const { return path_; }
    // 1000 * major + 10 * minor; 0 where the library is too old to say.
    int version() const { return version_; }
    // "" if the driver session is open, else why it cannot be opened.
    std::string open_driver() const;
    // None where the library cannot say. Only once the driver is open.
    std::optional<Properties> properties() const;
    // A setting of cuFile's configuration; none where the library is too old to say.
    std::optional<bool> parameter(int index) const;

  private:
    friend class RegisteredFile;
    friend class RegisteredMemory;
    struct Calls;
    CuFile(std::string path, std::shared_ptr<const Calls> calls);

    const std::string path_;
    const std::shared_ptr<const Calls> calls_;
    const pid_t owner_;
    int version_ = 0;
};

// A file that cuFile knows, which it must to move anything. Goes before the file it keeps open.
class RegisteredFile {
  public:
    // Throws IoError where cuFile refuses the file. `file` has O_DIRECT.
    RegisteredFile(std::shared_ptr<const CuFile> library, std::shared_ptr<const File> file, int device);
    ~RegisteredFile();
    RegisteredFile(const RegisteredFile&) = delete;
    RegisteredFile& operator=(const RegisteredFile&) = delete;

    const std::shared_ptr<const File>& file() const { return file_; }
    // Blocks. Returns bytes moved, -errno, or the negative of an error of cuFile.
    int64_t move(const Request& request) const;

  private:
    const std::shared_ptr<const CuFile> library_;
    const std::shared_ptr<const File> file_;
    const std::shared_ptr<const Descriptors> descriptors_;  // cuFile has their number: they stay open
    const pid_t owner_;
    void* handle_ = nullptr;
};

// Device memory that cuFile has mapped, so that transfers in it need no copy on the device either. The memory
// must outlive it, and nothing may be in flight when it goes.
class RegisteredMemory {
  public:
    // Throws IoError where cuFile refuses.
    RegisteredMemory(std::shared_ptr<const CuFile> library, char* data, uint64_t length, int device);
    ~RegisteredMemory();
    RegisteredMemory(const RegisteredMemory&) = delete;
    RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  private:
    const std::shared_ptr<const CuFile> library_;
    char* const data_;
    const int device_;
    const pid_t owner_;
};

// What cuFile needs to know of a transfer besides its bytes.
struct DeviceTarget {
    std::shared_ptr<const RegisteredFile> file;
    char* base = nullptr;  // start of the registered memory that holds all of it; null for none
    int device = -1;
};

}  // namespace swapper
