// Bindings of codecs, checksums and native steps.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bf16_codec.h"
#include "bf16_packing.h"
#include "bindings.h"
#include "codec.h"
#include "crc32.h"
#include "crc32c.h"
#include "int8_codec.h"
#include "native_step.h"
#include "packing.h"
#include "prefault.h"
#include "vendor_sqrt.h"

namespace swapper {
namespace {

// Offset of a tensor's values, its elements, offset of its table.
using Piece = std::tuple<size_t, size_t, size_t>;

PackedRecord packed_record(uintptr_t data, size_t length_bytes, size_t end, const std::vector<Piece>& pieces,
                           size_t tail, size_t tail_bytes) {
    PackedRecord record{target(data), length_bytes, end, {}, tail, tail_bytes};
    record.pieces.reserve(pieces.size());
    for (const auto& [values, numel, table] : pieces) record.pieces.push_back({values, numel, table});
    return record;
}

}  // namespace

void bind_codecs(py::module_& module) {
    module.def(
        "split_master",
        [](uintptr_t master, uintptr_t param, uintptr_t low, uintptr_t ties, size_t numel, unsigned threads) {
            return split_master(source(master), target(param), target(low), target(ties), numel, threads);
        },
        "master"_a, "param"_a, "low"_a, "ties"_a, "numel"_a, "threads"_a, NoGil());
    module.def(
        "join_master",
        [](uintptr_t param, uintptr_t low, uintptr_t ties, size_t tie_bits, uintptr_t master, size_t numel,
           unsigned threads) {
            join_master(source(param), source(low), source(ties), tie_bits, target(master), numel, threads);
        },
        "param"_a, "low"_a, "ties"_a, "tie_bits"_a, "master"_a, "numel"_a, "threads"_a, NoGil());
    module.def(
        "encode_bf16",
        [](uintptr_t values, uintptr_t stored, size_t numel, uint64_t first, uint32_t seed, uint32_t name,
           uint32_t step, uint32_t parameter, unsigned threads) {
            encode_bf16(source(values), target(stored), numel, first, {seed, name, step, parameter}, threads);
        },
        "values"_a, "stored"_a, "numel"_a, "first"_a, "seed"_a, "name"_a, "step"_a, "parameter"_a,
        "threads"_a, NoGil());
    module.def(
        "decode_bf16",
        [](uintptr_t stored, uintptr_t values, size_t numel, unsigned threads) {
            decode_bf16(source(stored), target(values), numel, threads);
        },
        "stored"_a, "values"_a, "numel"_a, "threads"_a, NoGil());
    module.def(
        "encode_int8",
        [](uintptr_t values, uintptr_t codes, uintptr_t scales, size_t numel, uint64_t first, uint32_t seed,
           uint32_t name, uint32_t step, uint32_t parameter, unsigned threads) {
            encode_int8(source(values), target(codes), target(scales), numel, first,
                        {seed, name, step, parameter}, threads);
        },
        "values"_a, "codes"_a, "scales"_a, "numel"_a, "first"_a, "seed"_a, "name"_a, "step"_a, "parameter"_a,
        "threads"_a, NoGil());
    module.def(
        "decode_int8",
        [](uintptr_t codes, uintptr_t scales, uintptr_t values, size_t numel, unsigned threads) {
            decode_int8(source(codes), source(scales), target(values), numel, threads);
        },
        "codes"_a, "scales"_a, "values"_a, "numel"_a, "threads"_a, NoGil());
    module.def(
        "pack_record",
        [](uintptr_t data, size_t length_bytes, size_t end, const std::vector<Piece>& pieces, size_t tail,
           size_t tail_bytes, unsigned threads) {
            return pack_record(packed_record(data, length_bytes, end, pieces, tail, tail_bytes), threads);
        },
        "data"_a, "length_bytes"_a, "end"_a, "pieces"_a, "tail"_a, "tail_bytes"_a, "threads"_a, NoGil());
    module.def(
        "packed_offsets",
        [](uintptr_t data, size_t length_bytes, size_t end, const std::vector<Piece>& pieces, size_t tail,
           size_t tail_bytes) {
            return packed_offsets(packed_record(data, length_bytes, end, pieces, tail, tail_bytes));
        },
        "data"_a, "length_bytes"_a, "end"_a, "pieces"_a, "tail"_a, "tail_bytes"_a, NoGil());
    module.def(
        "unpack_record",
        [](uintptr_t data, size_t length_bytes, size_t end, const std::vector<Piece>& pieces, size_t tail,
           size_t tail_bytes, unsigned threads) {
            unpack_record(packed_record(data, length_bytes, end, pieces, tail, tail_bytes), threads);
        },
        "data"_a, "length_bytes"_a, "end"_a, "pieces"_a, "tail"_a, "tail_bytes"_a, "threads"_a, NoGil());
    module.def(
        "packed_bytes", [](uintptr_t table, size_t numel) { return packed_bytes(source(table), numel); },
        "table"_a, "numel"_a, NoGil());
    module.def(
        "unpack_values",
        [](uintptr_t table, uintptr_t data, size_t length_bytes, uintptr_t values, size_t numel,
           unsigned threads) {
            unpack_values(source(table), source(data), length_bytes, target(values), numel, threads);
        },
        "table"_a, "data"_a, "length_bytes"_a, "values"_a, "numel"_a, "threads"_a, NoGil());
    module.def("packed_bf16_bytes_most", &packed_bf16_bytes_most, "numel"_a);
    module.def(
        "pack_bf16",
        [](uintptr_t values, size_t numel, uintptr_t packed, unsigned threads) {
            return pack_bf16(source(values), numel, target(packed), threads);
        },
        "values"_a, "numel"_a, "packed"_a, "threads"_a, NoGil());
    module.def(
        "unpack_bf16",
        [](uintptr_t packed, size_t length_bytes, uintptr_t values, size_t numel, unsigned threads) {
            unpack_bf16(source(packed), length_bytes, target(values), numel, threads);
        },
        "packed"_a, "length_bytes"_a, "values"_a, "numel"_a, "threads"_a, NoGil());
    module.def(
        "crc32c",
        [](uintptr_t address, size_t length_bytes, uint32_t seed, unsigned threads) {
            return crc32c(source(address), length_bytes, seed, threads);
        },
        "address"_a, "length_bytes"_a, "seed"_a = 0, "threads"_a = 1, NoGil());
    module.def(
        "crc32c_each",
        [](const std::vector<std::pair<uintptr_t, size_t>>& runs, unsigned threads) {
            std::vector<std::pair<const void*, size_t>> made;
            made.reserve(runs.size());
            for (const auto& [address, length_bytes] : runs) made.emplace_back(source(address), length_bytes);
            const GilReleased released;
            return crc32c_each(made, threads);
        },
        "runs"_a, "threads"_a);
    module.def(
        "crc32c_join",
        [](uint32_t crc_a, uint32_t crc_b, size_t length_b) {
            return crc32c_join(crc_a, crc_b, crc32c_shift(length_b));
        },
        "crc_a"_a, "crc_b"_a, "length_b_bytes"_a);
    module.def(
        "crc32c_by_table",
        [](uintptr_t address, size_t length_bytes, uint32_t seed) {
            return crc32c_by_table(source(address), length_bytes, seed);
        },
        "address"_a, "length_bytes"_a, "seed"_a = 0, NoGil());
    module.def(
        "crc32",
        [](uintptr_t address, size_t length_bytes, uint32_t seed) {
            return crc32(source(address), length_bytes, seed);
        },
        "address"_a, "length_bytes"_a, "seed"_a = 0, NoGil());
    module.def(
        "crc32_by_table",
        [](uintptr_t address, size_t length_bytes, uint32_t seed) {
            return crc32_by_table(source(address), length_bytes, seed);
        },
        "address"_a, "length_bytes"_a, "seed"_a = 0, NoGil());
    module.def(
        "address_of",
        [](const py::object& buffer, bool writable) {
            Py_buffer view;
            if (PyObject_GetBuffer(buffer.ptr(), &view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
                throw py::error_already_set();
            const auto place = py::make_tuple(reinterpret_cast<uintptr_t>(view.buf), view.len);
            PyBuffer_Release(&view);
            return place;
        },
        "buffer"_a, "writable"_a);
    module.def(
        "copy_crc32",
        [](uintptr_t destination, uintptr_t from, size_t length_bytes, uint32_t seed) {
            return copy_crc32(target(destination), source(from), length_bytes, seed);
        },
        "destination"_a, "source"_a, "length_bytes"_a, "seed"_a = 0, NoGil());
    module.def(
        "prefault",
        [](uintptr_t address, size_t length_bytes, unsigned threads) {
            prefault(target(address), length_bytes, threads);
        },
        "address"_a, "length_bytes"_a, "threads"_a, NoGil());
    module.def(
        "prefault_huge",
        [](uintptr_t address, size_t length_bytes) { prefault_huge(target(address), length_bytes); },
        "address"_a, "length_bytes"_a, NoGil());
}

namespace {

using InstructionTuple =
    std::tuple<unsigned, uint8_t, uint8_t, uint8_t, uint8_t, uint8_t, std::vector<double>>;
using EncodedTuple =
    std::tuple<unsigned, bool, bool, uintptr_t, uintptr_t, uint64_t, uint32_t, uint32_t, uint32_t, uint32_t>;
using JobTuple =
    std::tuple<std::shared_ptr<StepProgram>, size_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, size_t,
               uintptr_t, uintptr_t, bool, std::vector<uintptr_t>, std::vector<EncodedTuple>>;

Instruction instruction_of(const InstructionTuple& tuple) {
    const auto& [code, out, a, b, c, contraction, constants] = tuple;
    Instruction made;
    if (code >= kOpcodes || constants.size() > made.constants.size())
        throw py::value_error("unknown operation");
    made.code = static_cast<Opcode>(code);
    made.out = out;
    made.a = a;
    made.b = b;
    made.c = c;
    made.contraction = contraction;
    std::copy(constants.begin(), constants.end(), made.constants.begin());
    return made;
}

EncodedArray encoded_of(const EncodedTuple& tuple) {
    const auto& [encoding, decodes, encodes, data, scales, first, seed, name, step, parameter] = tuple;
    if (encoding > static_cast<unsigned>(EncodedArray::Encoding::kInt8))
        throw py::value_error("unknown encoding");
    EncodedArray made;
    made.encoding = static_cast<EncodedArray::Encoding>(encoding);
    made.decodes = decodes;
    made.encodes = encodes;
    made.data = target(data);
    made.scales = target(scales);
    made.first = first;
    made.key = {seed, name, step, parameter};
    return made;
}

StepJob job_of(const JobTuple& tuple) {
    const auto& [program, numel, param, bits, low, ties, tie_bits, new_ties, gradient, is_half, arrays,
                 encoded] = tuple;
    StepJob job;
    job.program = program;
    job.numel = numel;
    job.param = static_cast<float*>(target(param));
    job.bits = target(bits);
    job.low = target(low);
    job.ties = source(ties);
    job.tie_bits = tie_bits;
    job.new_ties = target(new_ties);
    job.gradient = source(gradient);
    job.is_half = is_half;
    for (const uintptr_t array : arrays) job.arrays.push_back(static_cast<float*>(target(array)));
    for (const auto& each : encoded) job.encoded.push_back(encoded_of(each));
    return job;
}

std::vector<StepJob> jobs_of(const std::vector<JobTuple>& tuples) {
    std::vector<StepJob> made;
    made.reserve(tuples.size());
    for (const auto& each : tuples) made.push_back(job_of(each));
    return made;
}

std::vector<std::pair<size_t, uint32_t>> tuples_of(const std::vector<StepResult>& results) {
    std::vector<std::pair<size_t, uint32_t>> made;
    made.reserve(results.size());
    for (const auto& each : results) made.emplace_back(each.tie_bits, each.crc);
    return made;
}

// Deletes without the GIL: the destructor may wait.
struct WithoutGil {
    void operator()(StepRun* run) const {
        const GilReleased released;
        delete run;
    }
};

}  // namespace

void bind_native_step(py::module_& module) {
    py::class_<StepProgram, std::shared_ptr<StepProgram>>(module, "StepProgram")
        .def(py::init([](const std::vector<InstructionTuple>& instructions, size_t arrays, size_t registers) {
                 std::vector<Instruction> made;
                 for (const auto& each : instructions) made.push_back(instruction_of(each));
                 return std::make_shared<StepProgram>(std::move(made), arrays, registers);
             }),
             "instructions"_a, "arrays"_a, "registers"_a);
    module.def(
        "run_step",
        [](const std::vector<JobTuple>& jobs, unsigned threads, unsigned instruction_set) {
            const std::vector<StepJob> made = jobs_of(jobs);
            std::vector<StepResult> results;
            {
                const GilReleased released;
                results = run_step(made, threads, static_cast<InstructionSet>(instruction_set));
            }
            return tuples_of(results);
        },
        "jobs"_a, "threads"_a, "instruction_set"_a);
    py::class_<StepRun, std::unique_ptr<StepRun, WithoutGil>>(module, "StepRun")
        .def(py::init([](const std::vector<JobTuple>& jobs, unsigned threads, unsigned instruction_set) {
                 return std::unique_ptr<StepRun, WithoutGil>(
                     new StepRun(jobs_of(jobs), threads, static_cast<InstructionSet>(instruction_set)));
             }),
             "jobs"_a, "threads"_a, "instruction_set"_a)
        .def("wait", [](StepRun& run) {
            std::vector<StepResult> results;
            {
                const GilReleased released;
                results = run.wait();
            }
            return tuples_of(results);
        });
    module.def(
        "has_instruction_set",
        [](unsigned set) { return has_instruction_set(static_cast<InstructionSet>(set)); },
        "instruction_set"_a);
    module.def("has_vendor_sqrt", &has_vendor_sqrt);
    module.def("best_instruction_set", [] { return static_cast<unsigned>(best_instruction_set()); });
}

}  // namespace swapper
