// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace swapper {

namespace py = pybind11;
using namespace py::literals;

// Lets other threads of Python run. At interpreter exit Python ends a daemon thread that wants to go on, by
// unwinding its stack: pybind11's own guard, whose destructor may not throw, would abort the process.
class GilReleased {
  public:
    GilReleased() : state_(PyEval_SaveThread()) {}
    ~GilReleased() noexcept(false) { PyEval_RestoreThread(state_); }
    GilReleased(const GilReleased&) = delete;
    GilReleased& operator=(const GilReleased&) = delete;

  private:
    PyThreadState* state_;
};
using NoGil = py::call_guard<GilReleased>;

inline const void* source(uintptr_t address) {
    return reinterpret_cast<const void*>(address);
}
inline void* target(uintptr_t address) {
    return reinterpret_cast<void*>(address);
}

void bind_codecs(py::module_& module);
void bind_cufile(py::module_& module);
void bind_engine(py::module_& module);
void bind_native_step(py::module_& module);

}  // namespace swapper
