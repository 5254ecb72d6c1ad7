// Transfers that are not over, in the order in which they were started, and the parts that I/O threads take
// of them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "engine_options.h"
#include "error.h"
#include "file.h"
#include "request.h"
#include "transfer.h"

namespace swapper {

class IoThread;

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};
using Block = std::unique_ptr<char, Free>;

// Null where there is no memory.
Block allocate_block(uint64_t alignment, uint64_t length);

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

// Why a transfer fails when the backend of a thread did.
std::string ended_by(const IoError& error);

// What the engine and its I/O threads share.
class TransferQueue {
  public:
    explicit TransferQueue(const EngineOptions& options_);
    ~TransferQueue();
    TransferQueue(const TransferQueue&) = delete;
    TransferQueue& operator=(const TransferQueue&) = delete;

    // Throws StateError after `stop`, and the IoError of a backend that has failed.
    void add(const std::shared_ptr<Transfer>& transfer);
    std::vector<std::shared_ptr<Transfer>> take_finished();
    // What is in the queue is done, and no more comes.
    void stop();
    // Throws as `add` does.
    void check_running();
    bool broken();

    // Gives out the next part of the front of the queue. Under the mutex. False if there is none, or if it
    // needs a bounce block and none is free.
    bool cut(Part& part, bool may_bounce);
    void part_over(Part& part, std::optional<IoError> error);
    // Everything that waits fails, because the backend of a thread did.
    void fail(const IoError& error);

    // Makes every thread register `wanted`, or none. One call at a time. Returns 0 or an errno.
    int set_pieces(const std::vector<Piece>& wanted);
    // What all threads have registered.
    std::vector<Piece> pieces();
    void forget_pieces();

    // Under the mutex, by a thread that takes up `pieces_wanted`: it has, with 0 or an errno.
    void pieces_taken(int error);
    // Under the mutex: nothing is left to be cut, and nothing will come.
    bool over() const { return stopping_ && waiting_.empty(); }
    // Under the mutex: the backend of a thread has failed, so that nothing more is taken.
    void set_broken(const IoError& error);

    const EngineOptions options;

    std::mutex mutex;  // for all below; taken before a backend's own
    std::vector<Piece> pieces_wanted;
    uint64_t pieces_generation = 0;
    std::vector<std::unique_ptr<IoThread>> threads;

  private:
    bool holds_back();
    void throw_if_ended() const;
    void offer_all();
    void finish(const std::shared_ptr<Transfer>& transfer);
    void wake_all();

    bool stopping_ = false;
    std::optional<IoError> broken_;
    std::deque<std::shared_ptr<Transfer>> waiting_;  // not cut to the end; the front is being cut
    std::vector<std::shared_ptr<Transfer>> finished_;
    std::vector<const Transfer*> ending_;  // cut to the end, and not over: their parts hold them
    uint64_t bytes_in_flight_ = 0;         // of parts that are not over
    bool held_back_ = false;               // a thread was told that there is nothing, because of `ending_`

    std::vector<Piece> pieces_;  // what all threads have registered; empty while that changes
    std::condition_variable pieces_changed_;
    size_t pieces_pending_ = 0;  // threads that have not taken up `pieces_wanted`
    int pieces_error_ = 0;
};

}  // namespace swapper
