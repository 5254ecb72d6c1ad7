#include "cufile.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "error.h"

namespace swapper {
namespace {

// cuFile's types, as its API reference has them.

struct Status {
    int error;       // CUfileOpError; 0 is success
    int cuda_error;  // CUresult, where `error` is kCudaDriverError
};
static_assert(sizeof(Status) == 8, "returned in one register");

struct Descriptor {
    int type;  // kOpaqueFd
    union {
        int fd;
        void* handle;
    } handle;
    const void* file_system_operations;  // of user-space file systems only
};
static_assert(sizeof(Descriptor) == 24, "layout of CUfileDescr_t");
constexpr int kOpaqueFd = 1;

struct DriverProperties {
    struct {
        unsigned major;
        unsigned minor;
        size_t poll_threshold;
        size_t max_direct_io;
        unsigned status_flags;
        unsigned control_flags;
    } nvfs;
    // Sizes that are of no use here follow, more of them in each version.
    char rest[256];
};

constexpr int kNotSupportedOnPlatform = 5007;
constexpr int kNotSupportedOnDevice = 5009;
constexpr int kCudaDriverError = 5011;
constexpr int kInvalidPointer = 5012;
constexpr int kDirectIoNotSet = 5020;
constexpr int kDriverOpenAlready = 5026;
constexpr int kFileRegisteredAlready = 5028;
constexpr int kDisabledByConfiguration = 5034;
constexpr int kPinningFailed = 5036;

const char* meaning(int error) {
    switch (error) {
        case 5001:
            return "the nvidia-fs driver is not loaded, and the compatibility mode is not allowed";
        case 5002:
            return "invalid property";
        case 5003:
            return "property out of range";
        case 5004:
            return "the versions of the library and of the nvidia-fs driver do not match";
        case 5005:
            return "the version of the nvidia-fs driver cannot be read";
        case 5006:
            return "the driver is closing";
        case kNotSupportedOnPlatform:
            return "GPUDirect Storage is not supported on this platform";
        case 5008:
            return "GPUDirect Storage is not supported on this file";
        case kNotSupportedOnDevice:
            return "GPUDirect Storage is not supported on this GPU";
        case 5010:
            return "the nvidia-fs driver reported an error";
        case kCudaDriverError:
            return "the CUDA driver reported an error";
        case kInvalidPointer:
            return "not a pointer to device memory";
        case 5013:
            return "memory of a kind that cuFile does not take";
        case 5014:
            return "beyond the end of the allocation";
        case 5015:
            return "memory of another CUDA context";
        case 5016:
            return "larger than what can be mapped";
        case 5017:
            return "beyond what is mapped";
        case 5018:
            return "not a kind of file that cuFile takes";
        case 5019:
            return "the file is opened with flags that cuFile does not take";
        case kDirectIoNotSet:
            return "the file is not opened with O_DIRECT";
        case 5022:
            return "invalid argument";
        case 5023:
            return "the memory is registered already";
        case 5024:
            return "the memory is not registered";
        case 5025:
            return "no permission to use the driver or the file";
        case kDriverOpenAlready:
            return "the driver is open already";
        case 5027:
            return "the file is not registered";
        case kFileRegisteredAlready:
            return "the file is registered already";
        case 5029:
            return "no such GPU";
        case 5030:
            return "internal error";
        case 5031:
            return "no new file descriptor";
        case 5033:
            return "the nvidia-fs driver could not be set up";
        case kDisabledByConfiguration:
            return "GPUDirect Storage is disabled for this file by the configuration";
        case kPinningFailed:
            return "no device memory could be pinned";
        case 5043:
            return "no memory";
        case 5044:
            return "input or output error";
        case 5045:
            return "the memory could not be registered";
        case 5047:
            return "invalid CUDA context";
        case 5048:
            return "internal error of the nvidia-fs driver";
        default:
            return "an error that swapper does not know";
    }
}

std::string text_of(const Status& status) {
    std::string text = cufile_error_text(status.error);
    if (status.error == kCudaDriverError) text += " (CUDA error " + std::to_string(status.cuda_error) + ")";
    return text;
}

// What of the CUDA driver is needed to have the right context current. Loaded at first use, when torch has
// loaded it long since.
class CudaDriver {
  public:
    static CudaDriver& get() {
        static CudaDriver* const driver = new CudaDriver;  // never destroyed: threads may outlive `main`
        return *driver;
    }

    // The primary context of `device`, null where it is not to be had. Kept for as long as the process lives,
    // as torch keeps it.
    void* context(int device) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto known = contexts_.find(device);
        if (known != contexts_.end()) return known->second;
        int handle = 0;
        void* context = nullptr;
        if (!loaded_ || initialize_(0) != 0 || device_get_(&handle, device) != 0 ||
            retain_(&context, handle) != 0) {
            return nullptr;
        }
        contexts_[device] = context;
        return context;
    }

    bool set_current(void* context) const { return set_current_(context) == 0; }
    bool push(void* context) const { return push_(context) == 0; }
    void pop() const {
        void* context = nullptr;
        (void)pop_(&context);
    }

  private:
    CudaDriver() {
        void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) return;
        loaded_ = find(library, "cuInit", initialize_) && find(library, "cuDeviceGet", device_get_) &&
                  find(library, "cuDevicePrimaryCtxRetain", retain_) &&
                  find(library, "cuCtxSetCurrent", set_current_) &&
                  find(library, "cuCtxPushCurrent_v2", push_) && find(library, "cuCtxPopCurrent_v2", pop_);
    }

    template <typename Call>
    static bool find(void* library, const char* name, Call& call) {
        call = reinterpret_cast<Call>(::dlsym(library, name));
        return call != nullptr;
    }

    bool loaded_ = false;
    int (*initialize_)(unsigned) = nullptr;
    int (*device_get_)(int*, int) = nullptr;
    int (*retain_)(void**, int) = nullptr;
    int (*set_current_)(void*) = nullptr;
    int (*push_)(void*) = nullptr;
    int (*pop_)(void**) = nullptr;
    std::mutex mutex_;
    std::map<int, void*> contexts_;
};

// Has the context of `device` current while it lives, on a thread that is not ours.
class ContextHere {
  public:
    explicit ContextHere(int device) {
        if (device < 0) return;
        void* const context = CudaDriver::get().context(device);
        pushed_ = context != nullptr && CudaDriver::get().push(context);
        failed_ = !pushed_;
    }
    ~ContextHere() {
        if (pushed_) CudaDriver::get().pop();
    }
    ContextHere(const ContextHere&) = delete;
    ContextHere& operator=(const ContextHere&) = delete;

    bool failed() const { return failed_; }

  private:
    bool pushed_ = false;
    bool failed_ = false;
};

// Has the context of `device` current on this thread, one of the pool's, which stays with it.
bool use_context_of(int device) {
    thread_local int current = -1;
    if (device < 0 || device == current) return true;
    void* const context = CudaDriver::get().context(device);
    if (context == nullptr || !CudaDriver::get().set_current(context)) return false;
    current = device;
    return true;
}

}  // namespace

std::string cufile_error_text(int error) {
    return "cuFile error " + std::to_string(error) + ": " + meaning(error);
}

int cufile_errno(int error) {
    if (error == kFileRegisteredAlready) return EALREADY;
    const bool cannot = (error >= kNotSupportedOnPlatform && error <= kNotSupportedOnDevice) ||
                        (error >= kInvalidPointer && error <= kDirectIoNotSet) ||
                        error == kDisabledByConfiguration || error == kPinningFailed;
    return cannot ? EOPNOTSUPP : EIO;
}

struct CuFile::Calls {
    // Every library has these.
    Status (*driver_open)() = nullptr;
    Status (*handle_register)(void** handle, Descriptor* descriptor) = nullptr;
    void (*handle_deregister)(void* handle) = nullptr;
    Status (*buffer_register)(const void* base, size_t length, int flags) = nullptr;
    Status (*buffer_deregister)(const void* base) = nullptr;
    ssize_t (*read)(void* handle, void* base, size_t length, off_t offset, off_t base_offset) = nullptr;
    ssize_t (*write)(void* handle, const void* base, size_t length, off_t offset,
                     off_t base_offset) = nullptr;
    // Null in those that are too old.
    Status (*get_version)(int* version) = nullptr;
    Status (*get_properties)(DriverProperties* properties) = nullptr;
    Status (*get_bool)(int parameter, bool* value) = nullptr;

    // "" or the name of what is missing.
    std::string find_all(void* library) {
        std::string missing;
        const auto find = [&](const char* name, auto& call, bool needed) {
            call = reinterpret_cast<std::decay_t<decltype(call)>>(::dlsym(library, name));
            if (call == nullptr && needed && missing.empty()) missing = name;
        };
        find("cuFileDriverOpen", driver_open, true);
        find("cuFileHandleRegister", handle_register, true);
        find("cuFileHandleDeregister", handle_deregister, true);
        find("cuFileBufRegister", buffer_register, true);
        find("cuFileBufDeregister", buffer_deregister, true);
        find("cuFileRead", read, true);
        find("cuFileWrite", write, true);
        find("cuFileGetVersion", get_version, false);
        find("cuFileDriverGetProperties", get_properties, false);
        find("cuFileGetParameterBool", get_bool, false);
        return missing;
    }
};

CuFile::CuFile(std::string path, std::shared_ptr<const Calls> calls)
    : path_(std::move(path)), calls_(std::move(calls)), owner_(::getpid()) {
    int version = 0;
    if (calls_->get_version != nullptr && calls_->get_version(&version).error == 0) version_ = version;
}

std::shared_ptr<const CuFile> CuFile::load(const std::vector<std::string>& names) {
    // dlopen gives the same address for the same library, whatever its name.
    static std::mutex mutex;
    static auto* const loaded = new std::map<void*, std::shared_ptr<const CuFile>>;  // see CudaDriver::get
    const std::lock_guard<std::mutex> lock(mutex);
    std::string reasons;
    for (const std::string& name : names) {
        void* const library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        std::string reason;
        if (library == nullptr) {
            const char* const error = ::dlerror();
            reason = error != nullptr ? error : name;
        } else {
            const auto known = loaded->find(library);
            if (known != loaded->end()) {
                if (known->second->owner_ == ::getpid()) return known->second;
                throw IoError(EPERM, "load cuFile", "", -1, -1,
                              "it was in use when this process was forked, and does not work in a child");
            }
            auto calls = std::make_shared<Calls>();
            reason = calls->find_all(library);
            if (reason.empty()) {
                std::shared_ptr<const CuFile> made(new CuFile(name, std::move(calls)));
                loaded->emplace(library, made);
                return made;
            }
            reason = name + " has no " + reason;
            ::dlclose(library);
        }
        reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    throw IoError(ENOENT, "load cuFile", "", -1, -1, reasons);
}

std::string CuFile::open_driver() const {
    const Status status = calls_->driver_open();
    // Success where it is open already; that is also an error in its list.
    return status.error == 0 || status.error == kDriverOpenAlready ? ""
                                                                   : "cuFileDriverOpen: " + text_of(status);
}

std::optional<CuFile::Properties> CuFile::properties() const {
    DriverProperties found{};
    if (calls_->get_properties == nullptr || calls_->get_properties(&found).error != 0) return std::nullopt;
    return Properties{found.nvfs.major, found.nvfs.minor, found.nvfs.status_flags, found.nvfs.control_flags};
}

std::optional<bool> CuFile::parameter(int index) const {
    bool value = false;
    if (calls_->get_bool == nullptr || calls_->get_bool(index, &value).error != 0) return std::nullopt;
    return value;
}

RegisteredFile::RegisteredFile(std::shared_ptr<const CuFile> library, std::shared_ptr<const File> file,
                               int device)
    : library_(std::move(library)),
      file_(std::move(file)),
      descriptors_(file_->await_descriptors({true, true})),
      owner_(::getpid()) {
    const ContextHere context(device);
    if (context.failed()) {
        throw IoError(EIO, "register file with cuFile", file_->path(), -1, -1, "no CUDA context");
    }
    Descriptor descriptor{};
    descriptor.type = kOpaqueFd;
    descriptor.handle.fd = descriptors_->direct.get();
    const Status status = library_->calls_->handle_register(&handle_, &descriptor);
    if (status.error != 0) {
        throw IoError(cufile_errno(status.error), "register file with cuFile", file_->path(), -1, -1,
                      text_of(status));
    }
}

RegisteredFile::~RegisteredFile() {
    if (::getpid() == owner_) library_->calls_->handle_deregister(handle_);
}

int64_t RegisteredFile::move(const Request& request) const {
    if (!use_context_of(request.device->device)) return -kCudaDriverError;
    // The offset in the memory counts in registered memory only.
    char* const base = request.device->base != nullptr ? request.device->base : request.data;
    const auto base_offset = static_cast<off_t>(request.data - base);
    const auto offset = static_cast<off_t>(request.offset);
    const CuFile::Calls& calls = *library_->calls_;
    errno = 0;
    const ssize_t moved = request.operation == Operation::kRead
                              ? calls.read(handle_, base, request.length, offset, base_offset)
                              : calls.write(handle_, base, request.length, offset, base_offset);
    if (moved != -1) return moved;
    return errno != 0 ? -errno : -EIO;
}

RegisteredMemory::RegisteredMemory(std::shared_ptr<const CuFile> library, char* data, uint64_t length,
                                   int device)
    : library_(std::move(library)), data_(data), device_(device), owner_(::getpid()) {
    const ContextHere context(device_);
    if (context.failed()) {
        throw IoError(EIO, "register memory with cuFile", "", -1, static_cast<int64_t>(length),
                      "no CUDA context");
    }
    const Status status = library_->calls_->buffer_register(data_, length, 0);
    if (status.error != 0) {
        throw IoError(cufile_errno(status.error), "register memory with cuFile", "", -1,
                      static_cast<int64_t>(length), text_of(status));
    }
}

RegisteredMemory::~RegisteredMemory() {
    if (::getpid() != owner_) return;
    const ContextHere context(device_);
    // Fails only for memory that is not registered, which leaves nothing to undo.
    (void)library_->calls_->buffer_deregister(data_);
}

}  // namespace swapper
