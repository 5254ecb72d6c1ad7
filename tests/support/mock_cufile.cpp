// The calls of cuFile over memory of the host, for tests: what it is asked is checked, counted, and made to
// fail. Built and controlled by test_gds.py.
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

struct Status {
    int error;
    int cuda_error;
};
struct Descriptor {
    int type;
    union {
        int fd;
        void* handle;
    } handle;
    const void* operations;
};
struct Properties {
    unsigned major, minor;
    size_t poll, direct;
    unsigned status, control;
    unsigned rest[6];
};
struct Handle {
    int fd;        // as registered: with O_DIRECT
    int buffered;  // takes any offset and length, as cuFile does
};

std::mutex mutex;
std::map<std::string, long> values;  // switches and counters
std::set<Handle*> handles;
std::map<const char*, size_t> buffers;
std::map<const void*, int> in_use;  // handles and bases of buffers

bool held() {
    const std::lock_guard<std::mutex> lock(mutex);
    return values["hold"] != 0;
}

Status fails_with(const char* name) {
    return {static_cast<int>(values[name]), values[name] == 5011 ? 999 : 0};
}

// The byte at an address of the simulated device, which the host cannot touch there: see `dma_window`. Under
// the lock.
char* byte_at(char* address) {
    const auto at = reinterpret_cast<intptr_t>(address);
    const long start = values["device_start"];
    const bool on_device = at >= start && at - start < values["device_length"];
    return on_device ? address + values["device_distance"] : address;
}

ssize_t move(bool read, void* handle_, char* base, size_t length, off_t offset, off_t base_offset) {
    auto* const handle = static_cast<Handle*>(handle_);
    long most, result, error, delay;
    char* bytes;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        ++values[read ? "reads" : "writes"];
        if (handles.count(handle) == 0) return -5027;
        const auto buffer = buffers.find(base);
        if (base_offset != 0 && buffer == buffers.end()) return -5024;
        if (buffer != buffers.end()) {
            if (base_offset < 0 || base_offset + length > buffer->second) return -5017;
            ++values["in_registered_memory"];
        }
        if (offset % 4096 != 0 || length % 4096 != 0) ++values["unaligned"];
        most = values["short"] > 0 ? values["short"] : static_cast<long>(length);
        delay = values["delay_us"];
        bool now = values["fail_at"] == 0;
        if (values["fail_at"] > 0 && --values["fail_at"] == 0) {
            now = true;
            values["fail_at"] = -1;  // no other
        }
        result = now ? values["result"] : 0;
        error = now ? values["errno"] : 0;
        bytes = byte_at(base + base_offset);
        ++in_use[handle];
        ++in_use[base];
        values["at_once_max"] = std::max(values["at_once_max"], ++values["at_once"]);
    }
    if (delay > 0) ::usleep(static_cast<useconds_t>(delay));
    while (held()) ::usleep(500);
    ssize_t moved;
    if (result != 0 || error != 0) {
        errno = static_cast<int>(error);
        moved = result != 0 ? result : -1;
    } else {
        const size_t part = std::min(length, static_cast<size_t>(most));
        moved = read ? ::pread(handle->buffered, bytes, part, offset)
                     : ::pwrite(handle->buffered, bytes, part, offset);
    }
    const int number = errno;
    const std::lock_guard<std::mutex> lock(mutex);
    if (moved > 0) values[read ? "bytes_read" : "bytes_written"] += static_cast<long>(moved);
    --values["at_once"];
    --in_use[handle];
    --in_use[base];
    errno = number;
    return moved;
}

}  // namespace

extern "C" {

void mock_set(const char* name, long value) {
    const std::lock_guard<std::mutex> lock(mutex);
    values[name] = value;
}

long mock_get(const char* name) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (std::string(name) == "open_handles") return static_cast<long>(handles.size());
    if (std::string(name) == "open_buffers") return static_cast<long>(buffers.size());
    return values[name];
}

void mock_reset() {
    const std::lock_guard<std::mutex> lock(mutex);
    values.clear();
    values["p2pdma"] = 1;
}

Status cuFileDriverOpen() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++values["opens"];
    return fails_with("open_error");
}

Status cuFileGetVersion(int* version) {
    *version = 1150;
    return {0, 0};
}

Status cuFileDriverGetProperties(void* properties) {
    const Properties found{2, 25, 8192, 16384, 1U << 4, 1U << 1, {}};
    *static_cast<Properties*>(properties) = found;
    return {0, 0};
}

Status cuFileGetParameterBool(int parameter, bool* value) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (parameter != 2 && parameter != 7) return {5022, 0};
    *value = values[parameter == 2 ? "force_compat" : "p2pdma"] != 0;
    return {0, 0};
}

Status cuFileHandleRegister(void** out, Descriptor* descriptor) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (values["register_error"] != 0) return fails_with("register_error");
    const int fd = descriptor->handle.fd;
    if (descriptor->type != 1 || descriptor->operations != nullptr) return {5022, 0};
    if ((::fcntl(fd, F_GETFL) & O_DIRECT) == 0) return {5020, 0};
    for (const Handle* handle : handles) {
        if (handle->fd == fd) return {5028, 0};
    }
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    const int buffered = ::open(path.c_str(), ::fcntl(fd, F_GETFL) & O_ACCMODE);
    if (buffered < 0) return {5031, 0};
    auto* const handle = new Handle{fd, buffered};
    handles.insert(handle);
    ++values["registered"];
    *out = handle;
    return {0, 0};
}

void cuFileHandleDeregister(void* handle_) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto* const handle = static_cast<Handle*>(handle_);
    if (handles.erase(handle) == 0) std::abort();          // deregistered twice
    if (in_use[handle] != 0) std::abort();                 // while in use
    if (::fcntl(handle->fd, F_GETFD) == -1) std::abort();  // after the file was closed
    ::close(handle->buffered);
    delete handle;
    ++values["deregistered"];
}

Status cuFileBufRegister(const void* base, size_t length, int flags) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (values["buffer_error"] != 0) return fails_with("buffer_error");
    if (flags != 0 || length == 0) return {5022, 0};
    if (!buffers.emplace(static_cast<const char*>(base), length).second) return {5023, 0};
    return {0, 0};
}

Status cuFileBufDeregister(const void* base) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (in_use[base] != 0) std::abort();  // while in use
    return {buffers.erase(static_cast<const char*>(base)) == 1 ? 0 : 5024, 0};
}

ssize_t cuFileRead(void* handle, void* base, size_t length, off_t offset, off_t base_offset) {
    return move(true, handle, static_cast<char*>(base), length, offset, base_offset);
}

ssize_t cuFileWrite(void* handle, const void* base, size_t length, off_t offset, off_t base_offset) {
    return move(false, handle, const_cast<char*>(static_cast<const char*>(base)), length, offset,
                base_offset);
}

}  // extern "C"
