#include "transfer_queue.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "io_thread.h"

namespace swapper {

Block allocate_block(uint64_t alignment, uint64_t length) {
    // aligned_alloc asks for a length that is a multiple of the alignment; both are here, or 4096 divides it.
    return Block(
        static_cast<char*>(std::aligned_alloc(alignment, (length + alignment - 1) / alignment * alignment)));
}

std::string ended_by(const IoError& error) {
    return std::string("the I/O thread ended: ") + error.what();
}

TransferQueue::TransferQueue(const EngineOptions& options_) : options(options_) {}

TransferQueue::~TransferQueue() {
    threads.clear();  // They use the rest.
}

void TransferQueue::throw_if_ended() const {
    if (stopping_) throw StateError("the I/O handle is closed");
    if (broken_) throw IoError(*broken_);
}

void TransferQueue::add(const std::shared_ptr<Transfer>& transfer) {
    const std::lock_guard<std::mutex> lock(mutex);
    throw_if_ended();
    if (transfer->length() == 0) {
        finish(transfer);
        return;
    }
    waiting_.push_back(transfer);
    offer_all();
}

std::vector<std::shared_ptr<Transfer>> TransferQueue::take_finished() {
    std::vector<std::shared_ptr<Transfer>> taken;
    const std::lock_guard<std::mutex> lock(mutex);
    taken.swap(finished_);
    return taken;
}

void TransferQueue::stop() {
    const std::lock_guard<std::mutex> lock(mutex);
    stopping_ = true;
    wake_all();
}

void TransferQueue::check_running() {
    const std::lock_guard<std::mutex> lock(mutex);
    throw_if_ended();
}

bool TransferQueue::broken() {
    const std::lock_guard<std::mutex> lock(mutex);
    return broken_.has_value();
}

void TransferQueue::set_broken(const IoError& error) {
    if (!broken_) broken_ = error;
}

bool TransferQueue::cut(Part& part, bool may_bounce) {
    while (!waiting_.empty() && waiting_.front()->error_) waiting_.pop_front();  // its last part reports it
    if (waiting_.empty() || holds_back()) return false;
    Transfer& transfer = *waiting_.front();
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
    for (size_t i = 0; i < pieces_.size() && !bounced; ++i) {
        const Piece& piece = pieces_[i];
        if (memory < piece.data || memory >= piece.data + piece.length) continue;
        const auto room = static_cast<uint64_t>(piece.data + piece.length - memory);
        const uint64_t whole = std::min(length, direct ? room / page * page : room);
        if (whole > 0 && (whole == length || transfer.checksums() == nullptr)) {  // blocks stay whole
            length = whole;
            buffer_index = static_cast<int>(i);
        }
        break;
    }

    part.transfer = waiting_.front();
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
    bytes_in_flight_ += length;
    ++transfer.parts_;
    if (transfer.cut_ == transfer.length_) {
        ending_.push_back(&transfer);
        waiting_.pop_front();
    }
    return true;
}

// Whether parts of later transfers wait until an earlier one is over. Under the mutex.
//
// A drive shares itself among what is in flight, and some, virtual ones above all, report nothing until they
// have done all of it. The last parts of a transfer would take as long as a full queue of later ones, and
// whoever waits for one record to give its memory to the next would have both at once, and then an idle
// drive. So later ones only fill half of all queues while an earlier one is not over.
bool TransferQueue::holds_back() {
    const uint64_t queues = options.block_bytes * options.queue_depth * options.threads;
    held_back_ = !ending_.empty() && bytes_in_flight_ >= std::max(queues / 2, options.block_bytes);
    return held_back_;
}

void TransferQueue::part_over(Part& part, std::optional<IoError> error) {
    Transfer& transfer = *part.transfer;
    std::shared_ptr<const File> file;
    DeviceTarget device;  // goes before the file
    {
        const std::lock_guard<std::mutex> lock(mutex);
        bytes_in_flight_ -= part.part_length;
        if (std::exchange(held_back_, false)) offer_all();
        if (error && !transfer.error_) transfer.error_ = std::move(error);
        if (--transfer.parts_ > 0) return;  // drained before it is reported
        if (!transfer.error_ && transfer.cut_ < transfer.length_) return;
        file = std::move(transfer.file_);
        device = std::move(transfer.device_);
    }
    device.file.reset();  // Whoever knows that it is over may register the file again
    file.reset();  // It may be the last to have it open, and closing may take long: not under the mutex
    const std::lock_guard<std::mutex> lock(mutex);
    finish(part.transfer);
}

// Nothing of it is in flight any more. Under the mutex.
void TransferQueue::finish(const std::shared_ptr<Transfer>& transfer) {
    if (transfer->key_ != 0) finished_.push_back(transfer);
    const auto found = std::find(ending_.begin(), ending_.end(), transfer.get());
    if (found != ending_.end()) ending_.erase(found);
    transfer->complete();
    if (std::exchange(held_back_, false)) offer_all();
}

void TransferQueue::fail(const IoError& error) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const std::shared_ptr<Transfer>& transfer : waiting_) {
        if (transfer->error_) continue;
        transfer->error_ = IoError(error.code, name_of(transfer->operation_), transfer->path(),
                                   static_cast<int64_t>(transfer->offset_),
                                   static_cast<int64_t>(transfer->length_), ended_by(error));
        if (transfer->parts_ > 0) continue;
        finish(transfer);
    }
    waiting_.clear();
}

void TransferQueue::offer_all() {
    for (const std::unique_ptr<IoThread>& thread : threads) thread->offer();
}

void TransferQueue::wake_all() {
    for (const std::unique_ptr<IoThread>& thread : threads) thread->wake();
}

std::vector<Piece> TransferQueue::pieces() {
    const std::lock_guard<std::mutex> lock(mutex);
    return pieces_;
}

void TransferQueue::forget_pieces() {
    const std::lock_guard<std::mutex> lock(mutex);
    pieces_.clear();
}

void TransferQueue::pieces_taken(int error) {
    if (error != 0) pieces_error_ = error;
    --pieces_pending_;
    pieces_changed_.notify_all();
}

int TransferQueue::set_pieces(const std::vector<Piece>& wanted) {
    std::unique_lock<std::mutex> lock(mutex);
    pieces_.clear();  // parts cut from now on name none
    pieces_wanted = wanted;
    ++pieces_generation;
    pieces_error_ = 0;
    pieces_pending_ = 0;
    for (const std::unique_ptr<IoThread>& thread : threads) pieces_pending_ += thread->ended() ? 0 : 1;
    wake_all();
    pieces_changed_.wait(lock, [this] { return pieces_pending_ == 0; });
    if (pieces_error_ == 0) pieces_ = wanted;
    return pieces_error_;
}

}  // namespace swapper
