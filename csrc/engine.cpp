#include "engine.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>

namespace swapper {
namespace {

// EINTR, or want of something in the kernel, in a row, without a byte moved, before a part is given up; about
// 2 s of the latter.
constexpr uint32_t kMaxRetries = 200;
// Bounce blocks per I/O thread, each of `block_bytes`: enough to overlap copying with the drive.
constexpr size_t kBounceBlocks = 8;

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");

long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    return ::syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG,
                     value, timeout, nullptr, 0);
}

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};
using Block = std::unique_ptr<char, Free>;

// Null where there is no memory.
Block allocate_block(uint64_t alignment, uint64_t length) {
    // aligned_alloc asks for a length that is a multiple of the alignment; both are here, or 4096 divides it.
    return Block(
        static_cast<char*>(std::aligned_alloc(alignment, (length + alignment - 1) / alignment * alignment)));
}

// Signals are for the threads of Python; ours would only see system calls interrupted.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t before_{};
};

std::unique_ptr<Backend> make_backend(BackendKind kind, uint32_t queue_depth) {
    switch (kind) {
        case BackendKind::kAio:
            return make_aio_backend(queue_depth);
        case BackendKind::kUring:
            return make_uring_backend(queue_depth);
        case BackendKind::kCuFile:
            return make_cufile_backend(queue_depth);
        case BackendKind::kThreads:
            break;
    }
    return make_threads_backend(queue_depth);
}

std::string ended_by(const IoError& error) {
    return std::string("the I/O thread ended: ") + error.what();
}

// A part of a transfer on its way: one request, and what is needed to continue it.
struct Part : Request {
    std::shared_ptr<Transfer> transfer;
    char* memory = nullptr;    // where the caller wants the part; `data` is elsewhere if it is bounced
    uint64_t part_offset = 0;  // of the whole part; `offset` advances with what has moved
    uint32_t part_length = 0;
    uint64_t alignment = 1;                          // of offset and length, while it goes direct
    std::shared_ptr<const Descriptors> descriptors;  // null until it is submitted
    bool bounced = false;
    Block block;          // holds the bytes if `bounced`
    bool summed = false;  // the checksums of what is to be written are noted
    bool refused_direct =
        false;  // goes through the page cache, because the direct descriptor answered EINVAL
    uint32_t retries = 0;
};

}  // namespace

Transfer::Transfer(Operation operation, std::shared_ptr<const File> file, char* data, uint64_t length,
                   uint64_t offset, uint64_t key, std::shared_ptr<Checksums> checksums, DeviceTarget device)
    : operation_(operation),
      file_(std::move(file)),
      data_(data),
      length_(length),
      offset_(offset),
      key_(key),
      checksums_(std::move(checksums)),
      device_(std::move(device)) {}

bool Transfer::wait(int64_t timeout_ms) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (!done()) {
        const auto left =
            std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now())
                .count();
        if (left <= 0) return false;
        timespec timeout{};
        timeout.tv_sec = static_cast<time_t>(left / 1000000000);
        timeout.tv_nsec = static_cast<long>(left % 1000000000);
        futex(state_, FUTEX_WAIT, kPending, &timeout);  // woken, timed out or interrupted: look again
    }
    return true;
}

uint64_t Transfer::result() const {
    if (failed()) throw IoError(*error_);
    return length_;
}

void Transfer::complete() {
    ended_ = std::chrono::steady_clock::now();
    if (cut_ == 0) begun_ = ended_;
    state_.store(error_ ? kFailed : kComplete, std::memory_order_release);
    futex(state_, FUTEX_WAKE, INT_MAX, nullptr);
}

struct Engine::Impl {
    explicit Impl(const EngineOptions& options_) : options(options_), owner(::getpid()) {}

    bool cut(Part& part, bool may_bounce);
    bool holds_back();
    void part_over(Part& part, std::optional<IoError> error);
    void fail_queue(const IoError& error);
    void over(const std::shared_ptr<Transfer>& transfer);
    void wake_all();
    int set_pieces(const std::vector<Piece>& wanted);

    const EngineOptions options;
    const pid_t owner;

    std::mutex close_mutex;    // one `close` at a time
    std::mutex control_mutex;  // one change of pieces at a time; taken before `mutex`

    std::mutex mutex;                             // for all below; taken before a backend's own
    std::deque<std::shared_ptr<Transfer>> queue;  // not cut to the end; the front is being cut
    std::vector<std::shared_ptr<Transfer>> finished;
    std::vector<const Transfer*> ending;  // cut to the end, and not over: their parts hold them
    uint64_t bytes_in_flight = 0;         // of parts that are not over
    bool held_back = false;               // a worker was told that there is nothing, because of `ending`
    bool stopping = false;
    std::optional<IoError> broken;

    std::vector<std::shared_ptr<Slab>> slabs;
    std::vector<Piece> pieces;  // what all workers have registered; empty while that changes
    std::condition_variable pieces_changed;
    std::vector<Piece> pieces_wanted;
    uint64_t pieces_generation = 0;
    size_t pieces_pending = 0;  // workers that have not taken up `pieces_wanted`
    int pieces_error = 0;

    std::vector<std::unique_ptr<Worker>> workers;
};

// One I/O thread with its backend.
class Engine::Worker {
  public:
    Worker(Impl& impl, uint64_t index) : impl_(impl), index_(index), parts_(impl.options.queue_depth) {
        spare_blocks_.reserve(kBounceBlocks);
        for (Part& part : parts_) free_.push_back(&part);
        completions_.resize(parts_.size());
        batch_.reserve(parts_.size());
        std::promise<void> started;
        std::future<void> ready = started.get_future();
        try {
            const SignalsBlocked blocked;
            thread_ = std::thread(&Worker::run, this, std::move(started));
        } catch (const std::system_error& error) {
            throw IoError(error.code().value(), "start I/O thread");
        }
        try {
            ready.get();
        } catch (...) {
            thread_.join();
            throw;
        }
    }

    ~Worker() { join(); }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    void join() {
        if (thread_.joinable()) thread_.join();
    }

    // Under the engine's mutex, which keeps the backend from going away meanwhile.
    void wake() {
        if (!ended_) backend_->wake();
    }

    // There is something new in the queue. One system call for many transfers: a worker that is awake, or has
    // no room, comes to the queue by itself. Under the engine's mutex.
    void offer() {
        if (!wants_parts_) return;
        wants_parts_ = false;
        wake();
    }

    // Under the engine's mutex.
    bool ended() const { return ended_; }

  private:
    void run(std::promise<void> started) {
        (void)pthread_setname_np(pthread_self(), "swapper-io");
        try {
            backend_ = make_backend(impl_.options.backend, impl_.options.queue_depth);
            if (impl_.options.faults) {
                backend_ = make_fault_backend(std::move(backend_), impl_.options.faults, index_);
            }
        } catch (...) {
            ended_ = true;
            started.set_exception(std::current_exception());
            return;
        }
        started.set_value();
        std::optional<IoError> failure;
        try {
            while (fill()) {
                submit();
                reap();
            }
            backend_->set_pieces({});  // unpins now, though a forked child may still hold the ring
        } catch (const IoError& error) {
            failure = error;
        } catch (const std::exception& error) {
            failure = IoError(ENOMEM, "run I/O thread", "", -1, -1, error.what());
        }
        end(failure);
    }

    // Takes parts from the queue. False when there is nothing left to do, ever.
    bool fill() {
        std::unique_lock<std::mutex> lock(impl_.mutex);
        wants_parts_ = false;
        if (generation_ != impl_.pieces_generation) {
            // Drain first: requests in flight name the pieces of the old list.
            if (in_flight_ > 0 || !ready_.empty()) return true;
            const uint64_t generation = impl_.pieces_generation;  // stays while this worker is waited for
            const std::vector<Piece> wanted = impl_.pieces_wanted;
            lock.unlock();
            const int error = backend_->set_pieces(wanted);
            lock.lock();
            generation_ = generation;  // only now: if `set_pieces` threw, `end` has to tell whoever waits
            if (error != 0) impl_.pieces_error = error;
            --impl_.pieces_pending;
            impl_.pieces_changed.notify_all();
        }
        if (!impl_.options.overlap_events && in_flight_ > 0) return true;
        while (!free_.empty() && impl_.cut(*free_.back(), bounces_ < kBounceBlocks)) {
            Part* part = free_.back();
            free_.pop_back();
            if (part->bounced) ++bounces_;
            ready_.push_back(part);
        }
        wants_parts_ = !free_.empty();
        return !(impl_.stopping && impl_.queue.empty() && ready_.empty() && in_flight_ == 0);
    }

    void submit() {
        if (!impl_.options.overlap_events && in_flight_ > 0) return;
        while (!ready_.empty()) {
            batch_.clear();
            for (auto at = ready_.begin(); at != ready_.end(); ++at) {
                Part* const part = *at;
                if (!part->descriptors) {
                    std::optional<IoError> refused = open_for(*part);
                    if (refused) {
                        const bool wanting = refused->code == EMFILE || refused->code == ENFILE;
                        if (wanting && ++part->retries <= kMaxRetries) {
                            // All are in use: whatever is over gives some back.
                            backoff_ms_ = std::max(backoff_ms_, std::min(part->retries, 10U));
                            if (batch_.empty()) return;
                            break;
                        }
                        ready_.erase(at);
                        finish(*part, std::move(refused));
                        backend_->wake();  // there is room for more from the queue: `reap` may not wait
                        break;
                    }
                }
                if (!prepare_bounce(*part)) {
                    ready_.erase(at);
                    finish(*part, failure(*part, ENOMEM, "no memory to copy unaligned data through"));
                    backend_->wake();  // there is room for more from the queue: `reap` may not wait
                    break;
                }
                batch_.push_back(part);
                const bool summed = note_checksums(*part);
                // What had to be touched goes before the next is touched, so that the drive works meanwhile.
                if (impl_.options.single_submit || part->bounced || summed) break;
            }
            if (batch_.empty()) continue;
            const size_t taken = backend_->submit(batch_.data(), batch_.size());
            in_flight_ += taken;
            ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(taken));
            if (taken > 0) starved_ = 0;
            if (taken == batch_.size()) continue;
            // No room in the kernel. If nothing of ours is in flight it is others who fill it: let time pass.
            if (in_flight_ == 0) {
                if (++starved_ > kMaxRetries) throw IoError(EAGAIN, "submit");
                std::this_thread::sleep_for(std::chrono::milliseconds(10));
            }
            return;
        }
    }

    void reap() {
        const bool block = in_flight_ > 0 || ready_.empty();
        const size_t count = backend_->reap(completions_.data(), completions_.size(), block);
        in_flight_ -= count;
        for (size_t i = 0; i < count; ++i) {
            advance(static_cast<Part&>(*completions_[i].request), completions_[i].result);
        }
        if (backoff_ms_ == 0) return;
        // Once for all that came back: in turn, a deep queue would take minutes to give up.
        std::this_thread::sleep_for(std::chrono::milliseconds(std::exchange(backoff_ms_, 0)));
    }

    // Opens the file of `part` if it was closed: here, as it may take long. Returns why it could not.
    static std::optional<IoError> open_for(Part& part) {
        const Transfer& transfer = *part.transfer;
        try {
            // Not for as long as the transfer waits in the queue: so no more files are open than there are
            // requests.
            part.descriptors =
                transfer.file_->descriptors({part.operation == Operation::kWrite, part.alignment == 1});
        } catch (const IoError& error) {
            return error;
        }
        part.retries = 0;
        const bool direct = part.alignment > 1;
        part.fd = direct ? part.descriptors->direct.get() : part.descriptors->buffered.get();
        if (!direct && part.operation == Operation::kWrite) transfer.file_->note_buffered_write();
        return std::nullopt;
    }

    // Lets the rest of `part` go through the page cache, from the next submission on.
    static void go_buffered(Part& part) {
        part.descriptors.reset();
        part.alignment = 1;
    }

    // Allocated by the I/O thread, not under the mutex; kept for the next part that needs one. False where
    // there is no memory.
    bool prepare_bounce(Part& part) {
        if (!part.bounced || part.data != nullptr) return true;
        if (!spare_blocks_.empty()) {
            part.block = std::move(spare_blocks_.back());
            spare_blocks_.pop_back();
        } else {
            const uint64_t page = part.alignment;
            part.block = allocate_block(page, std::max(impl_.options.block_bytes, page));
            if (!part.block) return false;
        }
        part.data = part.block.get();
        if (part.operation == Operation::kWrite) std::memcpy(part.data, part.memory, part.length);
        return true;
    }

    // Whether there were checksums to note, before the kernel gets the bytes.
    static bool note_checksums(Part& part) {
        Checksums* const checksums = part.transfer->checksums();
        if (checksums == nullptr || part.operation != Operation::kWrite || part.summed) return false;
        checksums->record(part.offset, part.data, part.length);
        part.summed = true;
        return true;
    }

    // All bytes of `part` have moved.
    void complete(Part& part) {
        if (part.refused_direct) part.transfer->file_->give_up_direct();
        const Checksums* const checksums = part.transfer->checksums();
        if (part.operation == Operation::kWrite) return finish(part, std::nullopt);
        if (part.bounced) std::memcpy(part.memory, part.block.get(), part.part_length);
        if (checksums != nullptr) {
            const uint64_t bad = checksums->first_difference(part.part_offset, part.memory, part.part_length);
            const uint64_t end = part.part_offset + part.part_length;
            if (bad != end) {
                const uint64_t length = std::min(checksums->block_bytes(), end - bad);
                return finish(part, IoError(EBADMSG, name_of(part.operation), part.transfer->path(),
                                            static_cast<int64_t>(bad), static_cast<int64_t>(length),
                                            checksums->covers(bad, length)
                                                ? "the checksum of this block is not that of what was "
                                                  "written: the drive gave back other bytes"
                                                : "the checksum of this block cannot be checked: it was not "
                                                  "written, or with another length"));
            }
        }
        finish(part, std::nullopt);
    }

    // A request of `part` is over: go on with the rest of the part, or end it.
    void advance(Part& part, int64_t result) {
        const bool read = part.operation == Operation::kRead;
        if (result < 0) {
            const int error = static_cast<int>(-result);
            if (error > kCuFileErrors) {
                finish(part, failure(part, cufile_errno(error), cufile_error_text(error)));
                return;
            }
            const bool wanting = error == EAGAIN || error == EBUSY || error == ENOMEM;
            if (error == EINTR || wanting) {
                if (++part.retries > kMaxRetries) {
                    finish(part,
                           failure(part, error, "given up after " + std::to_string(kMaxRetries) + " tries"));
                    return;
                }
                // The first time at once; then whatever is short in the kernel gets time to come back.
                if (wanting && part.retries > 1) {
                    backoff_ms_ = std::max(backoff_ms_, std::min(part.retries, 10U));
                }
                ready_.push_back(&part);
                return;
            }
            if (error == EINVAL && part.alignment > 1 && part.device == nullptr) {
                // A file system that opens with O_DIRECT and then wants more of a request than it said; or
                // one that was cut to an odd length, as at RLIMIT_FSIZE. The page cache takes any.
                go_buffered(part);
                part.refused_direct = true;
                ready_.push_back(&part);
                return;
            }
            finish(part, failure(part, error, ""));
            return;
        }
        if (result == part.length) {
            complete(part);
            return;
        }
        if (result == 0) {
            finish(part, read ? failure(part, ENODATA, "") : failure(part, EIO, "the kernel wrote nothing"));
            return;
        }
        if (result > part.length) {
            finish(part, failure(part, EIO, "more bytes were moved than asked for"));
            return;
        }
        // Short. What does not fill an aligned block is moved again, which is harmless; if there is no whole
        // block, as at the unaligned end of a file, O_DIRECT cannot go on and the page cache does.
        auto moved = static_cast<uint32_t>(result);
        if (part.alignment > 1) {
            const auto whole = static_cast<uint32_t>(moved / part.alignment * part.alignment);
            if (whole == 0) {
                go_buffered(part);
            } else {
                moved = whole;
            }
        }
        part.data += moved;
        part.offset += moved;
        part.length -= moved;
        part.retries = 0;
        ready_.push_back(&part);
    }

    static IoError failure(const Part& part, int error, std::string detail) {
        const Transfer& transfer = *part.transfer;
        if (part.part_length != transfer.length()) {
            if (!detail.empty()) detail += "; ";
            detail += "it was the part of " + std::to_string(part.length) + " bytes at byte " +
                      std::to_string(part.offset);
        }
        return IoError(error, name_of(part.operation), transfer.path(),
                       static_cast<int64_t>(transfer.offset()), static_cast<int64_t>(transfer.length()),
                       std::move(detail));
    }

    void finish(Part& part, std::optional<IoError> error) {
        if (part.bounced) {
            if (part.block) spare_blocks_.push_back(std::move(part.block));
            part.bounced = false;
            --bounces_;
        }
        part.descriptors.reset();  // a file that was removed is closed before anybody hears of it
        impl_.part_over(part, std::move(error));
        part.transfer.reset();
        free_.push_back(&part);
    }

    // The thread ends, in order or because its backend broke.
    void end(const std::optional<IoError>& failure) {
        {
            const std::lock_guard<std::mutex> lock(impl_.mutex);
            ended_ = true;
            if (generation_ != impl_.pieces_generation) {
                impl_.pieces_error = ESHUTDOWN;
                --impl_.pieces_pending;
                impl_.pieces_changed.notify_all();
            }
            if (failure && !impl_.broken) impl_.broken = failure;
        }
        backend_.reset();  // nothing is in flight after this, so memory may be given back
        spare_blocks_.clear();
        if (!failure) return;
        for (Part& part : parts_) {
            if (!part.transfer) continue;
            finish(part, Worker::failure(part, failure->code, ended_by(*failure)));
        }
        impl_.fail_queue(*failure);
    }

    Impl& impl_;
    const uint64_t index_;
    std::unique_ptr<Backend> backend_;
    bool ended_ = false;        // under the engine's mutex
    bool wants_parts_ = false;  // likewise: it waits, with room for parts that are not there yet
    std::vector<Part> parts_;
    std::vector<Part*> free_;
    std::deque<Part*> ready_;  // to be submitted, in this order
    size_t in_flight_ = 0;
    uint32_t starved_ = 0;
    uint32_t backoff_ms_ = 0;
    uint64_t generation_ = 0;
    size_t bounces_ = 0;
    std::vector<Block> spare_blocks_;
    std::vector<Request*> batch_;
    std::vector<Completion> completions_;
    std::thread thread_;
};

// Gives out the next part of the front of the queue. Under the mutex. False if there is none, or if it needs
// a bounce block and none is free.
bool Engine::Impl::cut(Part& part, bool may_bounce) {
    while (!queue.empty() && queue.front()->error_) queue.pop_front();  // its last part reports it
    if (queue.empty() || holds_back()) return false;
    Transfer& transfer = *queue.front();
    const File& file = *transfer.file_;
    char* const memory = transfer.data_ + transfer.cut_;
    const uint64_t offset = transfer.offset_ + transfer.cut_;
    const uint64_t left = transfer.length_ - transfer.cut_;
    const uint64_t page = file.offset_alignment();

    uint64_t length = std::min(left, options.block_bytes);
    bool direct = file.direct();
    if (direct && (offset % page != 0 || left < page)) {
        direct = false;
        length = std::min(left, page - offset % page);  // see [Note: page cut] in file.h
    } else if (direct) {
        length = length / page * page;
        if (length == 0) length = page;  // pages larger than `block_bytes`
        if (transfer.checksums() != nullptr && length < left && left <= options.block_bytes) {
            direct =
                false;  // the end of a file that is no multiple of a page: the last block stays in one part
            length = left;
        }
    }
    const bool on_device = transfer.device_.file != nullptr;
    const bool bounced =
        direct && !on_device && reinterpret_cast<uintptr_t>(memory) % file.memory_alignment() != 0;
    if (bounced && !may_bounce) return false;

    int buffer_index = -1;
    for (size_t i = 0; i < pieces.size() && !bounced; ++i) {
        const Piece& piece = pieces[i];
        if (memory < piece.data || memory >= piece.data + piece.length) continue;
        const auto room = static_cast<uint64_t>(piece.data + piece.length - memory);
        const uint64_t whole = std::min(length, direct ? room / page * page : room);
        if (whole > 0 && (whole == length || transfer.checksums() == nullptr)) {  // blocks stay whole
            length = whole;
            buffer_index = static_cast<int>(i);
        }
        break;
    }

    part.transfer = queue.front();
    part.operation = transfer.operation_;
    part.fd = -1;
    part.alignment = direct ? page : 1;
    part.memory = memory;
    part.data = bounced ? nullptr : memory;
    part.bounced = bounced;
    part.offset = part.part_offset = offset;
    part.length = part.part_length = static_cast<uint32_t>(length);
    part.buffer_index = buffer_index;
    part.device = on_device ? &transfer.device_ : nullptr;
    part.summed = false;
    part.refused_direct = false;
    part.retries = 0;

    if (transfer.cut_ == 0) transfer.begun_ = std::chrono::steady_clock::now();
    transfer.cut_ += length;
    bytes_in_flight += length;
    ++transfer.parts_;
    if (transfer.cut_ == transfer.length_) {
        ending.push_back(&transfer);
        queue.pop_front();
    }
    return true;
}

// Whether parts of later transfers wait until an earlier one is over. Under the mutex.
//
// A drive shares itself among what is in flight, and some, virtual ones above all, report nothing until they
// have done all of it. The last parts of a transfer would take as long as a full queue of later ones, and
// whoever waits for one record to give its memory to the next would have both at once, and then an idle
// drive. So later ones only fill half of all queues while an earlier one is not over.
bool Engine::Impl::holds_back() {
    const uint64_t queues = options.block_bytes * options.queue_depth * options.threads;
    held_back = !ending.empty() && bytes_in_flight >= std::max(queues / 2, options.block_bytes);
    return held_back;
}

void Engine::Impl::part_over(Part& part, std::optional<IoError> error) {
    Transfer& transfer = *part.transfer;
    std::shared_ptr<const File> file;
    DeviceTarget device;  // goes before the file
    {
        const std::lock_guard<std::mutex> lock(mutex);
        bytes_in_flight -= part.part_length;
        if (std::exchange(held_back, false)) {
            for (const std::unique_ptr<Worker>& worker : workers) worker->offer();
        }
        if (error && !transfer.error_) transfer.error_ = std::move(error);
        if (--transfer.parts_ > 0) return;  // drained before it is reported
        if (!transfer.error_ && transfer.cut_ < transfer.length_) return;
        file = std::move(transfer.file_);
        device = std::move(transfer.device_);
    }
    device.file.reset();  // Whoever knows that it is over may register the file again
    file.reset();  // It may be the last to have it open, and closing may take long: not under the mutex
    const std::lock_guard<std::mutex> lock(mutex);
    over(part.transfer);
}

// Nothing of it is in flight any more. Under the mutex.
void Engine::Impl::over(const std::shared_ptr<Transfer>& transfer) {
    if (transfer->key_ != 0) finished.push_back(transfer);
    const auto found = std::find(ending.begin(), ending.end(), transfer.get());
    if (found != ending.end()) ending.erase(found);
    transfer->complete();
    if (!std::exchange(held_back, false)) return;
    for (const std::unique_ptr<Worker>& worker : workers) worker->offer();
}

void Engine::Impl::fail_queue(const IoError& error) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const std::shared_ptr<Transfer>& transfer : queue) {
        if (transfer->error_) continue;
        transfer->error_ = IoError(error.code, name_of(transfer->operation_), transfer->path(),
                                   static_cast<int64_t>(transfer->offset_),
                                   static_cast<int64_t>(transfer->length_), ended_by(error));
        if (transfer->parts_ > 0) continue;
        over(transfer);
    }
    queue.clear();
}

void Engine::Impl::wake_all() {
    for (const std::unique_ptr<Worker>& worker : workers) worker->wake();
}

// Makes every worker register `wanted`, or none. Under `control_mutex`. Returns 0 or an errno.
int Engine::Impl::set_pieces(const std::vector<Piece>& wanted) {
    std::unique_lock<std::mutex> lock(mutex);
    pieces.clear();  // parts cut from now on name none
    pieces_wanted = wanted;
    ++pieces_generation;
    pieces_error = 0;
    pieces_pending = 0;
    for (const std::unique_ptr<Worker>& worker : workers) pieces_pending += worker->ended() ? 0 : 1;
    wake_all();
    pieces_changed.wait(lock, [this] { return pieces_pending == 0; });
    if (pieces_error == 0) pieces = wanted;
    return pieces_error;
}

Engine::Engine(const EngineOptions& options) : impl_(std::make_unique<Impl>(options)) {
    const uint64_t block = options.block_bytes;
    if (block < 4096 || block % 4096 != 0 || block > kPieceBytes || options.queue_depth < 1 ||
        options.queue_depth > 4096 || options.threads < 1 || options.threads > 256) {
        throw IoError(EINVAL, "start I/O engine", "", -1, -1,
                      "block_bytes, queue_depth or threads out of range");
    }
    try {
        impl_->workers.reserve(options.threads);  // a worker that is not in the list could not be ended
        for (uint32_t i = 0; i < options.threads; ++i) {
            impl_->workers.push_back(std::make_unique<Worker>(*impl_, i));
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
        if (impl.options.block_bytes % block != 0 || (block % page != 0 && page % block != 0)) {
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
    if (checked().options.backend != BackendKind::kCuFile || offset % page != 0 || length % page != 0 ||
        offset > INT64_MAX || length > INT64_MAX - offset) {
        throw std::invalid_argument("not a transfer for cuFile");
    }
    return enqueue(
        std::make_shared<Transfer>(operation, file, data, length, offset, 0, nullptr, std::move(device)));
}

std::shared_ptr<Transfer> Engine::enqueue(std::shared_ptr<Transfer> transfer) {
    Impl& impl = checked();
    const std::lock_guard<std::mutex> lock(impl.mutex);
    if (impl.stopping) throw StateError("the I/O handle is closed");
    if (impl.broken) throw IoError(*impl.broken);
    if (transfer->length() == 0) {
        impl.over(transfer);
        return transfer;
    }
    impl.queue.push_back(transfer);
    for (const std::unique_ptr<Worker>& worker : impl.workers) worker->offer();
    return transfer;
}

std::vector<std::shared_ptr<Transfer>> Engine::take_finished() {
    Impl& impl = checked();
    std::vector<std::shared_ptr<Transfer>> taken;
    const std::lock_guard<std::mutex> lock(impl.mutex);
    taken.swap(impl.finished);
    return taken;
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
    std::vector<Piece> before;
    {
        const std::lock_guard<std::mutex> lock(impl.mutex);
        if (impl.stopping) throw StateError("the I/O handle is closed");
        if (impl.broken) throw IoError(*impl.broken);
        before = impl.pieces;
    }
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
    const int error = impl.set_pieces(wanted);
    if (error == 0) {
        if (!known) impl.slabs.push_back(std::move(slab));
        return "";
    }
    if (impl.set_pieces(before) != 0) impl.set_pieces({});
    std::string reason = std::string("registering ") + std::to_string(slab->ready()) + " bytes: ";
    if (error == EOPNOTSUPP && impl.options.backend != BackendKind::kUring) {
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
    std::vector<Piece> wanted;
    {
        const std::lock_guard<std::mutex> lock(impl.mutex);
        wanted = pieces_without(impl.pieces, *slab);
    }
    if (impl.set_pieces(wanted) != 0) impl.set_pieces({});
    impl.slabs.erase(at);
}

bool Engine::broken() const {
    Impl& impl = checked();
    const std::lock_guard<std::mutex> lock(impl.mutex);
    return impl.broken.has_value();
}

void Engine::close() {
    Impl& impl = checked();
    const std::lock_guard<std::mutex> closing(impl.close_mutex);
    {
        const std::lock_guard<std::mutex> lock(impl.mutex);
        impl.stopping = true;
        impl.wake_all();
    }
    for (const std::unique_ptr<Worker>& worker : impl.workers) worker->join();
    const std::lock_guard<std::mutex> control(impl.control_mutex);
    const std::lock_guard<std::mutex> lock(impl.mutex);
    impl.pieces.clear();
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
