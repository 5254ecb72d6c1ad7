// Reads and writes of any size, as the requests of `TransferQueue`, which has the policy, by `IoThread`s.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "checksums.h"
#include "cufile.h"
#include "engine_options.h"
#include "file.h"
#include "pinned.h"
#include "transfer.h"

namespace swapper {

// Owns the I/O threads. Transfers start in the order of `start` and run side by side; those that overlap in a
// file are not ordered against each other. Every method but the destructor may be called from any thread, and
// none submits to the kernel on it. In a forked child every method throws StateError and the destructor does
// nothing.
class Engine {
  public:
    // Throws IoError where the backend is not to be had.
    explicit Engine(const EngineOptions& options);
    ~Engine();  // closes
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // `key` is the caller's, to know the transfer by in `take_finished`; 0: it is not to be there. A length
    // of 0 is done on return. With `checksums` a write sets them and a read is checked against them, on the
    // I/O threads; a read that does not match fails with EBADMSG and the offset of the block. Throws
    // std::invalid_argument unless `offset` is the start of one of their blocks, those divide `block_bytes`,
    // and they reach far enough.
    std::shared_ptr<Transfer> start(Operation operation, std::shared_ptr<const File> file, char* data,
                                    uint64_t length, uint64_t offset, uint64_t key = 0,
                                    std::shared_ptr<Checksums> checksums = nullptr);

    // `start` for device memory, with the cuFile backend. Throws std::invalid_argument unless `offset` and
    // `length` are multiples of the file's `offset_alignment`: cuFile would read and write back the rest of a
    // page, and undo what another transfer writes there.
    std::shared_ptr<Transfer> start_on_device(Operation operation, DeviceTarget device, char* data,
                                              uint64_t length, uint64_t offset);

    // Transfers with a key that are done, each returned once.
    std::vector<std::shared_ptr<Transfer>> take_finished();

    // Registers what is ready of the slab with the kernel, in pieces, so that it need not map pages at each
    // request; to be called again when more of it is ready. Waits for what is in flight. Keeps the slab alive
    // until `unregister_slab` or `close`. Returns "" or the reason why this could not be done; transfers work
    // all the same.
    std::string register_slab(std::shared_ptr<Slab> slab);
    void unregister_slab(const Slab* slab);

    // Whether a backend has failed, so that every `start` throws.
    bool broken() const;

    // Drains what is in flight and ends the threads. Idempotent. Later `start` throws StateError.
    void close();

  private:
    struct Impl;
    Impl& checked() const;
    std::shared_ptr<Transfer> enqueue(std::shared_ptr<Transfer> transfer);
    std::unique_ptr<Impl> impl_;
};

// Whether this system offers a backend, tried for real. Returns "" or the reason why not. `fixed`: whether
// io_uring also registers memory.
std::string probe_backend(BackendKind kind, bool fixed);

}  // namespace swapper
