"""Builds the native core `swapper.io._native` from `csrc/`. Metadata is in pyproject.toml.

Switches, as environment variables:
    DEBUG=1                                -O0 -g and assertions
    SANITIZE=address,undefined | thread    build with these sanitizers: the first finding ends the process. The run-time
                                           must be preloaded; `make sanitize` does it
    WERROR=1                               a warning ends it, as in `make test`: users' compilers may know others
"""

import os
import sys
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

if not sys.platform.startswith("linux"):
    sys.exit("tensor-swapper needs Linux: it moves tensors with O_DIRECT, io_uring and kernel AIO.")

compile_args = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-fvisibility=hidden"]
compile_args += ["-Werror"] if os.environ.get("WERROR") == "1" else []
# Arithmetic on floats is as it is written: no multiplication and addition become one where they are not written so. The
# other two change no value: that sqrt sets errno, or that an operation traps, keeps loops from becoming vectors.
compile_args += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# pybind11's own headers are not held to our warnings.
compile_args += ["-isystem", pybind11.get_include()]
link_args = ["-pthread"]
debug, sanitizers = os.environ.get("DEBUG") == "1", os.environ.get("SANITIZE")
if debug:
    compile_args += ["-O0", "-g3", "-UNDEBUG"]
else:
    # pybind11's templates under sanitizers take a quarter of the time to compile with -O1.
    compile_args += ["-O1" if sanitizers else "-O3", "-g1"]
if sanitizers:
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    # It looks at objects through a pipe: in tests that leave no descriptor for one it takes good objects for bad ones.
    flags += ["-fno-sanitize=vptr"]
    compile_args += flags
    link_args += flags

ParallelCompile("NPY_NUM_BUILD_JOBS", default=os.cpu_count() or 1).install()
setup(
    ext_modules=[
        Pybind11Extension(
            "swapper.io._native",
            sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            include_dirs=["csrc"],
            cxx_std=17,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ],
    cmdclass={"build_ext": build_ext},
)
