#include "engine.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "io_thread.h"
#include "transfer_queue.h"

namespace swapper {

struct Engine::Impl {
    explicit Impl(const EngineOptions& options) : queue(options), owner(::getpid()) {}

    TransferQueue queue;
    const pid_t owner;

    std::mutex close_mutex;    // one `close` at a time
    std::mutex control_mutex;  // one change of pieces at a time; taken before the queue's
    std::vector<std::shared_ptr<Slab>> slabs;
};

Engine::Engine(const EngineOptions& options) : impl_(std::make_unique<Impl>(options)) {
    const uint64_t block = options.block_bytes;
    if (block < 4096 || block % 4096 != 0 || block > kPieceBytes || options.queue_depth < 1 ||
        options.queue_depth > 4096 || options.threads < 1 || options.threads > 256) {
        throw IoError(EINVAL, "start I/O engine", "", -1, -1,
                      "block_bytes, queue_depth or threads out of range");
    }
    try {
        impl_->queue.threads.reserve(options.threads);  // a thread that is not in the list could not be ended
        for (uint32_t i = 0; i < options.threads; ++i) {
            impl_->queue.threads.push_back(std::make_unique<IoThread>(impl_->queue, i));
        }
    } catch (...) {
        close();  // ends those that did start
        throw;
    }
}

Engine::~Engine() {
    if (::getpid() == impl_->owner) {
        close();
    } else {
        // The threads are the parent's and its locks may be held for ever in this copy: leave it all alone.
        (void)impl_.release();
    }
}

Engine::Impl& Engine::checked() const {
    if (::getpid() != impl_->owner) {
        throw StateError(
            "this I/O handle was made before a fork: it works in the parent only, make a new one");
    }
    return *impl_;
}

std::shared_ptr<Transfer> Engine::start(Operation operation, std::shared_ptr<const File> file, char* data,
                                        uint64_t length, uint64_t offset, uint64_t key,
                                        std::shared_ptr<Checksums> checksums) {
    Impl& impl = checked();
    if (offset > INT64_MAX || length > INT64_MAX - offset) {
        throw IoError(EFBIG, name_of(operation), file->path());
    }
    if (checksums) {
        const uint64_t block = checksums->block_bytes();
        const uint64_t page = file->offset_alignment();
        if (impl.queue.options.block_bytes % block != 0 || (block % page != 0 && page % block != 0)) {
            throw std::invalid_argument("the blocks of the checksums do not divide those of the engine");
        }
        if (offset % block != 0) throw std::invalid_argument("the offset is not the start of a block");
        if (offset + length > checksums->length())
            throw std::invalid_argument("beyond what the checksums cover");
    }
    return enqueue(std::make_shared<Transfer>(operation, std::move(file), data, length, offset, key,
                                              std::move(checksums), DeviceTarget{}));
}

std::shared_ptr<Transfer> Engine::start_on_device(Operation operation, DeviceTarget device, char* data,
                                                  uint64_t length, uint64_t offset) {
    const std::shared_ptr<const File> file = device.file->file();
    const uint64_t page = file->offset_alignment();
    if (!file->direct()) {  // It was when the transfer was planned; the caller has another way.
        throw IoError(EOPNOTSUPP, name_of(operation), file->path(), static_cast<int64_t>(offset),
                      static_cast<int64_t>(length), "the file system refused a direct transfer");
    }
    if (checked().queue.options.backend != BackendKind::kCuFile || offset % page != 0 || length % page != 0 ||
        offset > INT64_MAX || length > INT64_MAX - offset) {
        throw std::invalid_argument("not a transfer for cuFile");
    }
    return enqueue(
        std::make_shared<Transfer>(operation, file, data, length, offset, 0, nullptr, std::move(device)));
}

std::shared_ptr<Transfer> Engine::enqueue(std::shared_ptr<Transfer> transfer) {
    checked().queue.add(transfer);
    return transfer;
}

std::vector<std::shared_ptr<Transfer>> Engine::take_finished() {
    return checked().queue.take_finished();
}

namespace {

std::vector<Piece> pieces_without(const std::vector<Piece>& pieces, const Slab& slab) {
    std::vector<Piece> others;
    for (const Piece& piece : pieces) {
        if (piece.data < slab.data() || piece.data >= slab.data() + slab.length()) others.push_back(piece);
    }
    return others;
}

}  // namespace

std::string Engine::register_slab(std::shared_ptr<Slab> slab) {
    Impl& impl = checked();
    const std::lock_guard<std::mutex> control(impl.control_mutex);
    impl.slabs.reserve(impl.slabs.size() + 1);  // what is registered must be kept: adding it may not fail
    impl.queue.check_running();
    const std::vector<Piece> before = impl.queue.pieces();
    // Pieces of the slab from when less of it was ready are made anew: no two of them meet within a buffer.
    std::vector<Piece> wanted = pieces_without(before, *slab);
    uint64_t there = 0;
    for (const Piece& piece : before) there += piece.length;
    for (const Piece& piece : wanted) there -= piece.length;
    const bool known = std::find(impl.slabs.begin(), impl.slabs.end(), slab) != impl.slabs.end();
    if (known && there == slab->ready()) return "";
    for (uint64_t at = 0; at < slab->ready(); at += kPieceBytes) {
        wanted.push_back({slab->data() + at, std::min(kPieceBytes, slab->ready() - at)});
    }
    const int error = impl.queue.set_pieces(wanted);
    if (error == 0) {
        if (!known) impl.slabs.push_back(std::move(slab));
        return "";
    }
    if (impl.queue.set_pieces(before) != 0) impl.queue.set_pieces({});
    std::string reason = std::string("registering ") + std::to_string(slab->ready()) + " bytes: ";
    if (error == EOPNOTSUPP && impl.queue.options.backend != BackendKind::kUring) {
        return reason + "only io_uring registers memory";
    }
    reason += std::strerror(error);
    if (error == ENOMEM || error == EPERM) reason += " (RLIMIT_MEMLOCK: raise `ulimit -l`)";
    return reason;
}

void Engine::unregister_slab(const Slab* slab) {
    Impl& impl = checked();
    const std::lock_guard<std::mutex> control(impl.control_mutex);
    const auto at = std::find_if(impl.slabs.begin(), impl.slabs.end(),
                                 [slab](const std::shared_ptr<Slab>& other) { return other.get() == slab; });
    if (at == impl.slabs.end()) return;
    const std::vector<Piece> wanted = pieces_without(impl.queue.pieces(), *slab);
    if (impl.queue.set_pieces(wanted) != 0) impl.queue.set_pieces({});
    impl.slabs.erase(at);
}

bool Engine::broken() const {
    return checked().queue.broken();
}

void Engine::close() {
    Impl& impl = checked();
    const std::lock_guard<std::mutex> closing(impl.close_mutex);
    impl.queue.stop();
    for (const std::unique_ptr<IoThread>& thread : impl.queue.threads) thread->join();
    const std::lock_guard<std::mutex> control(impl.control_mutex);
    impl.queue.forget_pieces();
    impl.slabs.clear();
}

std::string probe_backend(BackendKind kind, bool fixed) {
    try {
        const std::unique_ptr<Backend> backend = make_backend(kind, 8);
        if (!fixed) return "";
        const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
        const Block block = allocate_block(page, page);
        if (!block) return std::string("a page of memory: ") + std::strerror(ENOMEM);
        const int error = backend->set_pieces({{block.get(), page}});
        if (error != 0) return std::string("registering a page of memory: ") + std::strerror(error);
        backend->set_pieces({});
        return "";
    } catch (const IoError& error) {
        return error.what() + (error.detail.empty() ? "" : " (" + error.detail + ")");
    }
}

}  // namespace swapper
