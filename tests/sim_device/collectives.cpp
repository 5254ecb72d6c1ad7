// Collectives of device tensors among processes of this machine, each of which is one rank.
//
// [Note: late collectives] A collective is a piece of work of a stream, as with NCCL: it reads its inputs and
// writes its outputs when the stream gets there. A rank then publishes its inputs in a file, and waits for
// the files of the others. As it waits under the world's lock, and in the modes "lazy" and "random" another
// rank may have no reason to get there by itself, each process has a thread that brings its device as far as
// a rank that waits needs it: that rank says so with a file, too. All collectives of a process are in one
// stream, so ranks that call them in one order also run them in it, and none waits for another that waits for
// it.
#include <ATen/Dispatch_v2.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend.h"
#include "kernels.h"
#include "world.h"

namespace sim {
namespace {

using std::chrono::steady_clock;

constexpr auto kTimeout = std::chrono::seconds(120);
constexpr auto kPatience = std::chrono::milliseconds(2);
constexpr auto kPause = std::chrono::microseconds(100);

// What an output is made of.
struct Output {
    Operand target;
    int64_t from_rank;     // whose bytes; negative: those of all, reduced
    int64_t offset_bytes;  // in what a rank published
};

struct Collective {
    std::vector<Operand> published;
    std::vector<Output> outputs;
    std::string reduction;  // "sum", "avg", "max", "min" or "product"
    std::string place;      // of the files of a group: a directory, and what their names begin with
    int64_t number, rank, size;

    std::string file(int64_t n, int64_t of_rank) const {
        return place + "." + std::to_string(n) + "." + std::to_string(of_rank);
    }
    std::string wish() const { return place + "." + std::to_string(number) + ".wanted"; }

    void run() const {
        publish();
        std::vector<std::string> all;
        for (int64_t other = 0; other < size; ++other) all.push_back(read(other));
        for (const Output& output : outputs) {
            const at::Tensor target = output.target.on_host();
            if (output.target.span() == 0) continue;
            if (output.from_rank >= 0) {
                const std::string& bytes = all.at(static_cast<size_t>(output.from_rank));
                std::memcpy(target.mutable_data_ptr(), slice(bytes, output), output.target.span());
            } else {
                reduce(all, output, target);
            }
        }
        // Whoever has published this one has read all that was published for the one before.
        ::unlink(file(number - 1, rank).c_str());
        ::unlink((place + "." + std::to_string(number - 1) + ".wanted").c_str());
    }

  private:
    static const char* slice(const std::string& bytes, const Output& output) {
        const auto offset = static_cast<size_t>(output.offset_bytes);
        if (bytes.size() < offset + output.target.span())
            throw std::runtime_error("another rank has published less than this one reads");
        return bytes.data() + offset;
    }

    void publish() const {
        const std::string name = file(number, rank), temporary = name + ".new";
        std::ofstream out(temporary, std::ios::binary);
        for (const Operand& operand : published) {
            const at::Tensor values = operand.on_host();
            if (operand.span() > 0) {
                out.write(static_cast<const char*>(values.const_data_ptr()),
                          static_cast<std::streamsize>(operand.span()));
            }
        }
        out.close();
        if (!out || std::rename(temporary.c_str(), name.c_str()) != 0)
            throw std::runtime_error("cannot write " + name);
    }

    std::string read(int64_t other) const {
        const std::string name = file(number, other);
        const auto start = steady_clock::now();
        for (bool has_asked = false; ::access(name.c_str(), R_OK) != 0;) {
            const auto waited = steady_clock::now() - start;
            if (waited > kTimeout)
                throw std::runtime_error("rank " + std::to_string(other) + " does not take part in " + name);
            if (!has_asked && waited > kPatience) has_asked = std::ofstream(wish()).good();
            std::this_thread::sleep_for(kPause);
        }
        std::ifstream in(name, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }

    void reduce(const std::vector<std::string>& all, const Output& output, const at::Tensor& target) const {
        const auto numel = static_cast<size_t>(target.numel());
        AT_DISPATCH_V2(target.scalar_type(), "sim_reduce", AT_WRAP([&] {
                           auto* const result = static_cast<scalar_t*>(target.mutable_data_ptr());
                           std::vector<scalar_t> value(numel);
                           for (size_t other = 0; other < all.size(); ++other) {
                               std::memcpy(value.data(), slice(all[other], output), output.target.span());
                               for (size_t i = 0; i < numel; ++i)
                                   result[i] = other == 0 ? value[i] : joined(result[i], value[i]);
                           }
                           if (reduction == "avg") {
                               const auto count = static_cast<scalar_t>(static_cast<float>(size));
                               for (size_t i = 0; i < numel; ++i)
                                   result[i] = static_cast<scalar_t>(result[i] / count);
                           }
                       }),
                       AT_EXPAND(AT_ALL_TYPES), at::kHalf, at::kBFloat16);
    }

    template <typename Value>
    Value joined(Value a, Value b) const {
        if (reduction == "max") return a < b ? b : a;
        if (reduction == "min") return b < a ? b : a;
        if (reduction == "product") return static_cast<Value>(a * b);
        return static_cast<Value>(a + b);
    }
};

// The collectives that have not run yet, in their order, and the thread that lets others have them.
struct Pending {
    struct Entry {
        std::string wish;
        Mark mark;
    };
    std::mutex mutex;
    std::deque<Entry> entries;
    bool has_thread = false;

    void attend() {
        for (;; std::this_thread::sleep_for(kPatience)) {
            std::vector<Mark> wanted;
            {
                const std::lock_guard lock(mutex);
                for (const Entry& entry : entries) {
                    if (::access(entry.wish.c_str(), F_OK) == 0) wanted.push_back(entry.mark);
                }
            }
            for (const Mark mark : wanted) Entered()->scheduler.wait(mark);
        }
    }

    void add(Entry entry) {
        const std::lock_guard lock(mutex);
        entries.push_back(std::move(entry));
        if (!has_thread) std::thread([this] { attend(); }).detach();
        has_thread = true;
    }

    void remove_first() {
        const std::lock_guard lock(mutex);
        entries.pop_front();
    }
};

// Never destroyed: its thread runs until the process ends.
Pending& pending() {
    static Pending& made = *std::make_unique<Pending>().release();
    return made;
}

void start_collective(const std::vector<at::Tensor>& published, const std::vector<at::Tensor>& outputs,
                      const std::vector<int64_t>& from_ranks, const std::vector<int64_t>& offsets_bytes,
                      const std::string& reduction, const std::string& place, int64_t number, int64_t rank,
                      int64_t size, int64_t device) {
    const auto collective =
        std::make_shared<Collective>(Collective{{}, {}, reduction, place, number, rank, size});
    for (const at::Tensor& tensor : published) {
        TORCH_CHECK(tensor.is_contiguous(), "sim: tensors of a collective must be contiguous");
        collective->published.emplace_back(tensor);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
        TORCH_CHECK(outputs[i].is_contiguous(), "sim: tensors of a collective must be contiguous");
        collective->outputs.push_back({Operand(outputs[i]), from_ranks.at(i), offsets_bytes.at(i)});
    }
    const Entered world;
    const int stream = current_stream(static_cast<int>(device));
    // In one piece: a push runs what is due, and so perhaps this one.
    Mark mark = world->scheduler.mark(stream);
    ++mark.position;
    pending().add({collective->wish(), mark});
    world->scheduler.push(stream, {[collective] {
                                       pending().remove_first();
                                       collective->run();
                                   },
                                   {},
                                   {},
                                   0,
                                   "collective"});
    world->memory.reap();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sim, m) {
    m.def(
        "collective(Tensor[] published, Tensor[] outputs, int[] from_ranks, int[] offsets_bytes, str "
        "reduction, "
        "str place, int number, int rank, int size, int device) -> ()",
        start_collective);
}

}  // namespace sim
