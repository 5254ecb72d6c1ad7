#include "io_thread.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <system_error>
#include <utility>

namespace swapper {
namespace {

// EINTR, or want of something in the kernel, in a row, without a byte moved, before a part is given up; about
// 2 s of the latter.
constexpr uint32_t kMaxRetries = 200;
// Bounce blocks per I/O thread, each of `block_bytes`: enough to overlap copying with the drive.
constexpr size_t kBounceBlocks = 8;

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

// Whether memory that somebody else gave may be written at `memory`. A store that may not would end the
// process, so the kernel is asked, by a call that writes 8 bytes there and does nothing else: 0.1 us.
bool is_writable(char* memory) {
    return syscall(SYS_rt_sigprocmask, SIG_BLOCK, nullptr, memory, sizeof(uint64_t)) == 0 || errno != EFAULT;
}

}  // namespace

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

IoThread::IoThread(TransferQueue& queue, uint64_t index)
    : queue_(queue), index_(index), parts_(queue.options.queue_depth) {
    spare_blocks_.reserve(kBounceBlocks);
    for (Part& part : parts_) free_.push_back(&part);
    completions_.resize(parts_.size());
    batch_.reserve(parts_.size());
    std::promise<void> started;
    std::future<void> ready = started.get_future();
    try {
        const SignalsBlocked blocked;
        thread_ = std::thread(&IoThread::run, this, std::move(started));
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

void IoThread::run(std::promise<void> started) {
    (void)pthread_setname_np(pthread_self(), "swapper-io");
    try {
        backend_ = make_backend(queue_.options.backend, queue_.options.queue_depth);
        if (queue_.options.faults) {
            backend_ = make_fault_backend(std::move(backend_), queue_.options.faults, index_);
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

bool IoThread::fill() {
    std::unique_lock<std::mutex> lock(queue_.mutex);
    wants_parts_ = false;
    if (generation_ != queue_.pieces_generation) {
        // Drain first: requests in flight name the pieces of the old list.
        if (in_flight_ > 0 || !ready_.empty()) return true;
        const uint64_t generation = queue_.pieces_generation;  // stays while this thread is waited for
        const std::vector<Piece> wanted = queue_.pieces_wanted;
        lock.unlock();
        const int error = backend_->set_pieces(wanted);
        lock.lock();
        generation_ = generation;  // only now: if `set_pieces` threw, `end` has to tell whoever waits
        queue_.pieces_taken(error);
    }
    if (!queue_.options.overlap_events && in_flight_ > 0) return true;
    while (!free_.empty() && queue_.cut(*free_.back(), bounces_ < kBounceBlocks)) {
        Part* part = free_.back();
        free_.pop_back();
        if (part->bounced) ++bounces_;
        ready_.push_back(part);
    }
    wants_parts_ = !free_.empty();
    return !(queue_.over() && ready_.empty() && in_flight_ == 0);
}

void IoThread::submit() {
    if (!queue_.options.overlap_events && in_flight_ > 0) return;
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
            if (queue_.options.single_submit || part->bounced || summed) break;
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

void IoThread::reap() {
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

std::optional<IoError> IoThread::open_for(Part& part) {
    const Transfer& transfer = *part.transfer;
    try {
        // Not for as long as the transfer waits in the queue: so no more files are open than there are
        // requests.
        part.descriptors =
            transfer.file().descriptors({part.operation == Operation::kWrite, part.alignment == 1});
    } catch (const IoError& error) {
        return error;
    }
    part.retries = 0;
    const bool direct = part.alignment > 1;
    part.fd = direct ? part.descriptors->direct.get() : part.descriptors->buffered.get();
    if (!direct && part.operation == Operation::kWrite) transfer.file().note_buffered_write();
    return std::nullopt;
}

void IoThread::go_buffered(Part& part) {
    part.descriptors.reset();
    part.alignment = 1;
}

bool IoThread::prepare_bounce(Part& part) {
    if (!part.bounced || part.data != nullptr) return true;
    if (!spare_blocks_.empty()) {
        part.block = std::move(spare_blocks_.back());
        spare_blocks_.pop_back();
    } else {
        const uint64_t page = part.alignment;
        part.block = allocate_block(page, std::max(queue_.options.block_bytes, page));
        if (!part.block) return false;
    }
    part.data = part.block.get();
    if (part.operation == Operation::kWrite) std::memcpy(part.data, part.memory, part.length);
    return true;
}

bool IoThread::note_checksums(Part& part) {
    Checksums* const checksums = part.transfer->checksums();
    if (checksums == nullptr || part.operation != Operation::kWrite || part.summed) return false;
    checksums->record(part.offset, part.data, part.length);
    part.summed = true;
    return true;
}

void IoThread::complete(Part& part) {
    if (part.refused_direct) part.transfer->file().give_up_direct();
    const Checksums* const checksums = part.transfer->checksums();
    if (part.operation == Operation::kWrite) return finish(part, std::nullopt);
    if (part.bounced) {
        // As the kernel tells of memory that it reads into itself. A part that is bounced has pages of the
        // file, not a few bytes. A mapping ends inside of a tensor only where somebody has cut it.
        if (!is_writable(part.memory) || !is_writable(part.memory + part.part_length - sizeof(uint64_t))) {
            return finish(part, failure(part, EFAULT, ""));
        }
        std::memcpy(part.memory, part.block.get(), part.part_length);
    }
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

void IoThread::advance(Part& part, int64_t result) {
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

IoError IoThread::failure(const Part& part, int error, std::string detail) {
    const Transfer& transfer = *part.transfer;
    if (part.part_length != transfer.length()) {
        if (!detail.empty()) detail += "; ";
        detail += "it was the part of " + std::to_string(part.length) + " bytes at byte " +
                  std::to_string(part.offset);
    }
    return IoError(error, name_of(part.operation), transfer.path(), static_cast<int64_t>(transfer.offset()),
                   static_cast<int64_t>(transfer.length()), std::move(detail));
}

void IoThread::finish(Part& part, std::optional<IoError> error) {
    if (part.bounced) {
        if (part.block) spare_blocks_.push_back(std::move(part.block));
        part.bounced = false;
        --bounces_;
    }
    part.descriptors.reset();  // a file that was removed is closed before anybody hears of it
    queue_.part_over(part, std::move(error));
    part.transfer.reset();
    free_.push_back(&part);
}

void IoThread::end(const std::optional<IoError>& failure) {
    {
        const std::lock_guard<std::mutex> lock(queue_.mutex);
        ended_ = true;
        if (generation_ != queue_.pieces_generation) {
            queue_.pieces_taken(ESHUTDOWN);
        }
        if (failure) queue_.set_broken(*failure);
    }
    backend_.reset();  // nothing is in flight after this, so memory may be given back
    spare_blocks_.clear();
    if (!failure) return;
    for (Part& part : parts_) {
        if (!part.transfer) continue;
        finish(part, IoThread::failure(part, failure->code, ended_by(*failure)));
    }
    queue_.fail(*failure);
}

}  // namespace swapper
