// Bindings of files and transfers.
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "checksums.h"
#include "cufile.h"
#include "engine.h"
#include "error.h"
#include "fault_backend.h"
#include "file.h"
#include "pinned.h"

namespace swapper {
namespace {

BackendKind backend_kind(const std::string& name) {
    if (name == "threads") return BackendKind::kThreads;
    if (name == "aio") return BackendKind::kAio;
    if (name == "uring") return BackendKind::kUring;
    if (name == "cufile") return BackendKind::kCuFile;
    throw py::value_error("unknown backend: " + name);
}

std::shared_ptr<File> open_file(std::string path, const std::string& mode, bool create, bool truncate,
                                bool exclusive, bool direct, bool by_name) {
    OpenOptions options;
    options.access = mode == "r" ? Access::kRead : mode == "w" ? Access::kWrite : Access::kReadWrite;
    options.create = create;
    options.truncate = truncate;
    options.exclusive = exclusive;
    options.direct = direct;
    options.by_name = by_name;
    const GilReleased released;
    return std::make_shared<File>(std::move(path), options);
}

// A context manager: the file is open within.
struct OpenDescriptor {
    std::shared_ptr<const Descriptors> held;
};

// Waits in slices, so that Ctrl-C is seen at most 50 ms late; the transfer then goes on in flight.
uint64_t wait_transfer(const Transfer& transfer, std::optional<double> timeout_s) {
    constexpr int64_t kSliceMs = 50;
    constexpr double kForeverMs = 1e15;
    using Clock = std::chrono::steady_clock;
    if (timeout_s && std::isnan(*timeout_s)) throw py::value_error("timeout is NaN");
    const double limit_ms = timeout_s ? std::clamp(*timeout_s * 1e3, 0.0, kForeverMs) : kForeverMs;
    const auto begin = Clock::now();
    while (!transfer.done()) {
        const double left_ms =
            limit_ms - std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
        if (left_ms <= 0) {
            PyErr_SetString(PyExc_TimeoutError, "the transfer is still in flight");
            throw py::error_already_set();
        }
        {
            const GilReleased released;
            transfer.wait(std::min(kSliceMs, static_cast<int64_t>(std::ceil(left_ms))));
        }
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    return transfer.result();
}

// Seconds of CLOCK_MONOTONIC, as `time.perf_counter()` has them.
std::pair<double, double> times_of(const Transfer& transfer) {
    const auto seconds = [](std::chrono::steady_clock::time_point point) {
        return std::chrono::duration<double>(point.time_since_epoch()).count();
    };
    if (!transfer.done()) throw StateError("the transfer is still in flight");
    return {seconds(transfer.begun()), seconds(transfer.ended())};
}

std::shared_ptr<Transfer> start(Engine& engine, Operation operation, std::shared_ptr<File> file,
                                uintptr_t address, uint64_t length, uint64_t offset, uint64_t key,
                                std::shared_ptr<Checksums> checksums) {
    // The engine's own copy: it drops the last reference, and that may close the file, on its own thread.
    return engine.start(operation, std::move(file), reinterpret_cast<char*>(address), length, offset, key,
                        std::move(checksums));
}

std::shared_ptr<Transfer> start_on_device(Engine& engine, const std::string& operation,
                                          std::shared_ptr<RegisteredFile> file, uintptr_t address,
                                          uint64_t length, uint64_t offset, uintptr_t base, int device) {
    return engine.start_on_device(operation == "read" ? Operation::kRead : Operation::kWrite,
                                  {std::move(file), reinterpret_cast<char*>(base), device},
                                  reinterpret_cast<char*>(address), length, offset);
}

}  // namespace

void bind_cufile(py::module_& module) {
    py::class_<CuFile, std::shared_ptr<CuFile>>(module, "CuFile")
        .def_property_readonly("path", &CuFile::path)
        .def_property_readonly("version", &CuFile::version)
        .def("open_driver", &CuFile::open_driver, NoGil())
        .def("properties",
             [](const CuFile& library) -> std::optional<std::tuple<unsigned, unsigned, unsigned, unsigned>> {
                 const auto found = library.properties();
                 if (!found) return std::nullopt;
                 return std::tuple(found->nvfs_major, found->nvfs_minor, found->status_flags,
                                   found->control_flags);
             })
        .def("parameter", &CuFile::parameter, "index"_a)
        .def(
            "register_file",
            [](std::shared_ptr<CuFile> library, std::shared_ptr<File> file, int device) {
                return std::make_shared<RegisteredFile>(std::move(library), std::move(file), device);
            },
            "file"_a, "device"_a, NoGil())
        .def(
            "register_memory",
            [](std::shared_ptr<CuFile> library, uintptr_t address, uint64_t length, int device) {
                return std::make_shared<RegisteredMemory>(std::move(library),
                                                          reinterpret_cast<char*>(address), length, device);
            },
            "address"_a, "length_bytes"_a, "device"_a, NoGil());
    py::class_<RegisteredFile, std::shared_ptr<RegisteredFile>>(module, "RegisteredFile");
    py::class_<RegisteredMemory, std::shared_ptr<RegisteredMemory>>(module, "RegisteredMemory");
    module.def(
        "load_cufile",
        [](const std::vector<std::string>& names) {
            const py::gil_scoped_release released;
            return std::const_pointer_cast<CuFile>(CuFile::load(names));
        },
        "names"_a);
}

void bind_engine(py::module_& module) {
    py::class_<Slab, std::shared_ptr<Slab>>(module, "Slab", py::buffer_protocol())
        .def(py::init([](uint64_t length, std::optional<uint64_t> ready) {
                 return std::make_shared<Slab>(length, ready.value_or(length));
             }),
             "length_bytes"_a, "ready_bytes"_a = py::none(), NoGil())
        .def_property_readonly("length_bytes", &Slab::length)
        .def_property_readonly("ready_bytes", &Slab::ready)
        .def("extend", &Slab::extend, "ready_bytes"_a, NoGil())
        .def("shrink", &Slab::shrink, "ready_bytes"_a, NoGil())
        .def_property_readonly("address",
                               [](const Slab& slab) { return reinterpret_cast<uintptr_t>(slab.data()); })
        .def_property_readonly("locked", &Slab::locked)
        .def_property_readonly("lock_reason", &Slab::lock_refusal)
        .def("unlock", &Slab::unlock)  // with the GIL, which orders it with `locked`
        .def_buffer([](const Slab& slab) {
            if (!slab.in_owner_process()) throw StateError("this memory belongs to the parent process");
            return py::buffer_info(reinterpret_cast<uint8_t*>(slab.data()),
                                   static_cast<py::ssize_t>(slab.length()));
        });

    py::class_<OpenDescriptor>(module, "OpenDescriptor")
        .def("__enter__", [](const OpenDescriptor& open) { return open.held->buffered.get(); })
        .def("__exit__", [](OpenDescriptor& open, const py::args&) { open.held.reset(); });

    py::class_<File, std::shared_ptr<File>>(module, "File")
        .def(py::init(&open_file), "path"_a, "mode"_a, "create"_a, "truncate"_a, "exclusive"_a, "direct"_a,
             "by_name"_a)
        .def_property_readonly("direct", &File::direct)
        .def_property_readonly("direct_reason", &File::direct_refusal)
        .def_property_readonly("wrote_buffered", &File::wrote_buffered)
        .def_property_readonly("alignment_bytes", &File::offset_alignment)
        .def_property_readonly("memory_alignment_bytes", &File::memory_alignment)
        .def("fileno", &File::fileno, NoGil())
        .def("descriptor",
             [](const File& file) {
                 std::shared_ptr<const Descriptors> held = file.opened({false, true});
                 if (held == nullptr) {
                     const GilReleased released;
                     held = file.await_descriptors({false, true});
                 }
                 return OpenDescriptor{std::move(held)};
             })
        .def(
            "status",
            [](const File& file) {
                const struct stat info = file.status();
                return std::tuple(info.st_dev, info.st_ino, info.st_nlink, info.st_size,
                                  info.st_mtim.tv_sec * int64_t{1000000000} + info.st_mtim.tv_nsec);
            },
            NoGil())
        .def("leave_name", &File::leave_name, NoGil())
        .def("size_bytes", &File::size, NoGil())
        .def("preallocate", &File::preallocate, "length_bytes"_a, NoGil())
        .def("truncate", &File::truncate, "length_bytes"_a, NoGil())
        .def("check_written", &File::check_written, NoGil())
        .def("sync", &File::sync, NoGil());

    py::class_<Checksums, std::shared_ptr<Checksums>>(module, "Checksums")
        .def(py::init<uint64_t, uint64_t>(), "length_bytes"_a, "block_bytes"_a)
        .def_property_readonly("length_bytes", &Checksums::length)
        .def_property_readonly("block_bytes", &Checksums::block_bytes)
        .def(
            "record",
            [](Checksums& checksums, uint64_t offset, const py::bytes& data) {
                const std::string_view bytes = data;
                checksums.record(offset, bytes.data(), bytes.size());
            },
            "offset_bytes"_a, "data"_a)
        .def(
            "first_difference",
            [](const Checksums& checksums, uint64_t offset, const py::bytes& data) {
                const std::string_view bytes = data;
                return checksums.first_difference(offset, bytes.data(), bytes.size());
            },
            "offset_bytes"_a, "data"_a)
        .def("joined", &Checksums::joined, "length_bytes"_a, NoGil());

    module.def("exchange", &exchange, "first"_a, "second"_a, NoGil());
    module.def(
        "keep_open", [](const std::string& path) { OpenFiles::get().keep_open(path); }, "path"_a, NoGil());

    py::class_<Transfer, std::shared_ptr<Transfer>>(module, "Transfer")
        .def_property_readonly("key", &Transfer::key)
        .def("done", &Transfer::done)
        .def("failed", &Transfer::failed)
        .def("times_s", &times_of)
        .def("wait", &wait_transfer, "timeout"_a = py::none());

    py::class_<FaultPlan, std::shared_ptr<FaultPlan>>(module, "FaultPlan")
        .def(py::init([](uint64_t seed, double short_transfer, double eio, double enospc, double eintr,
                         double eagain, double einval, double full, uint32_t delay_us, bool reorder,
                         int64_t fail_read_at, int64_t fail_write_at, int fail_errno,
                         uint64_t bytes_per_second) {
                 auto plan = std::make_shared<FaultPlan>();
                 plan->seed = seed;
                 plan->short_transfer = short_transfer;
                 plan->eio = eio;
                 plan->enospc = enospc;
                 plan->eintr = eintr;
                 plan->eagain = eagain;
                 plan->einval = einval;
                 plan->full = full;
                 plan->delay_us = delay_us;
                 plan->reorder = reorder;
                 plan->fail_read_at = fail_read_at;
                 plan->fail_write_at = fail_write_at;
                 plan->fail_error = fail_errno;
                 plan->bytes_per_second = bytes_per_second;
                 return plan;
             }),
             py::kw_only(), "seed"_a = 0, "short"_a = 0.0, "eio"_a = 0.0, "enospc"_a = 0.0, "eintr"_a = 0.0,
             "eagain"_a = 0.0, "einval"_a = 0.0, "full"_a = 0.0, "delay_us"_a = 0, "reorder"_a = false,
             "fail_read_at"_a = 0, "fail_write_at"_a = 0, "fail_errno"_a = EIO, "bytes_per_second"_a = 0)
        .def_property(
            "fail_read_at", [](const FaultPlan& plan) { return plan.fail_read_at.load(); },
            [](FaultPlan& plan, int64_t n) { plan.fail_read_at = n; })
        .def_property(
            "fail_write_at", [](const FaultPlan& plan) { return plan.fail_write_at.load(); },
            [](FaultPlan& plan, int64_t n) { plan.fail_write_at = n; })
        .def_property(
            "fail_errno", [](const FaultPlan& plan) { return plan.fail_error.load(); },
            [](FaultPlan& plan, int error) { plan.fail_error = error; })
        .def_property(
            "bytes_per_second", [](const FaultPlan& plan) { return plan.bytes_per_second.load(); },
            [](FaultPlan& plan, uint64_t rate) {
                plan.bytes_per_second = rate;
                plan.busy_until_ns = 0;  // What was held at another rate takes no time of this one.
            })
        .def_property_readonly("reads", [](const FaultPlan& plan) { return plan.reads.load(); })
        .def_property_readonly("writes", [](const FaultPlan& plan) { return plan.writes.load(); });

    py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
        .def(py::init([](const std::string& backend, uint64_t block_bytes, uint32_t queue_depth,
                         uint32_t threads, bool single_submit, bool overlap_events,
                         std::shared_ptr<FaultPlan> faults) {
                 EngineOptions options;
                 options.backend = backend_kind(backend);
                 options.block_bytes = block_bytes;
                 options.queue_depth = queue_depth;
                 options.threads = threads;
                 options.single_submit = single_submit;
                 options.overlap_events = overlap_events;
                 options.faults = std::move(faults);
                 const GilReleased released;
                 return std::make_shared<Engine>(options);
             }),
             py::kw_only(), "backend"_a, "block_bytes"_a, "queue_depth"_a, "threads"_a, "single_submit"_a,
             "overlap_events"_a, "faults"_a)
        // With the GIL: they only take a short lock, and getting the GIL back could take a thread switch, 5
        // ms.
        .def(
            "read",
            [](Engine& engine, std::shared_ptr<File> file, uintptr_t address, uint64_t length,
               uint64_t offset, uint64_t key, std::shared_ptr<Checksums> checksums) {
                return start(engine, Operation::kRead, std::move(file), address, length, offset, key,
                             std::move(checksums));
            },
            "file"_a, "address"_a, "length_bytes"_a, "offset_bytes"_a, "key"_a, "checksums"_a)
        .def(
            "write",
            [](Engine& engine, std::shared_ptr<File> file, uintptr_t address, uint64_t length,
               uint64_t offset, uint64_t key, std::shared_ptr<Checksums> checksums) {
                return start(engine, Operation::kWrite, std::move(file), address, length, offset, key,
                             std::move(checksums));
            },
            "file"_a, "address"_a, "length_bytes"_a, "offset_bytes"_a, "key"_a, "checksums"_a)
        .def("start_on_device", &start_on_device, "operation"_a, "file"_a, "address"_a, "length_bytes"_a,
             "offset_bytes"_a, "base"_a, "device"_a)
        .def("take_finished", &Engine::take_finished)
        .def_property_readonly("broken", &Engine::broken)
        .def("register_slab", &Engine::register_slab, "slab"_a, NoGil())
        .def(
            "unregister_slab",
            [](Engine& engine, const std::shared_ptr<Slab>& slab) { engine.unregister_slab(slab.get()); },
            "slab"_a, NoGil())
        .def("close", &Engine::close, NoGil());

    module.def(
        "probe_backend",
        [](const std::string& name, bool fixed) { return probe_backend(backend_kind(name), fixed); },
        "name"_a, "fixed"_a);
}

}  // namespace swapper
