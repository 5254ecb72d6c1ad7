// The Python module `swapper.io._native`: convert, release the GIL, call once, wrap. Typed in _native.pyi.
#include "bindings.h"

#include <exception>

#include "error.h"

namespace swapper {
namespace {

void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const IoError& error) {
        const py::object type = py::module_::import("swapper.errors").attr("SwapIOError");
        // Names of files are bytes, not always UTF-8: as `os.fsdecode` has them.
        const auto path = py::reinterpret_steal<py::object>(
            PyUnicode_DecodeFSDefaultAndSize(error.path.data(), static_cast<py::ssize_t>(error.path.size())));
        if (!path) throw py::error_already_set();
        const py::object value =
            type(error.code, error.operation, path, error.offset, error.length, error.detail);
        PyErr_SetObject(type.ptr(), value.ptr());
    } catch (const StateError& error) {
        const py::object type = py::module_::import("swapper.errors").attr("SwapError");
        PyErr_SetString(type.ptr(), error.what());
    }
}

}  // namespace
}  // namespace swapper

PYBIND11_MODULE(_native, module) {
    pybind11::register_exception_translator(&swapper::translate);
    swapper::bind_cufile(module);
    swapper::bind_engine(module);
    swapper::bind_codecs(module);
    swapper::bind_native_step(module);
}
