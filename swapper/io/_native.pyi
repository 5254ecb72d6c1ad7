"""The native core: see csrc/bindings.cpp. Use it through the modules of `swapper.io` and `optimizer.master_codec`.

Every failure of the system raises `SwapIOError`, every use after a fork or after close `SwapError`.
"""

from collections.abc import Sequence

class Slab:
    """Supports the buffer protocol, which keeps it alive: `torch.frombuffer(slab, dtype=torch.uint8)`."""

    def __init__(self, length_bytes: int, ready_bytes: int | None = None) -> None:
        """Reserve `length_bytes` of addresses, and have the first `ready_bytes` in memory; None: all of them."""
    @property
    def length_bytes(self) -> int: ...
    @property
    def ready_bytes(self) -> int: ...
    def extend(self, ready_bytes: int) -> None:
        """Have at least the first `ready_bytes` in memory, locked if that is allowed. Not thread-safe."""
    def shrink(self, ready_bytes: int) -> None:
        """Give back the memory beyond, rounded up to huge pages. Nothing may use it any more. Not thread-safe."""
    @property
    def address(self) -> int: ...
    @property
    def locked(self) -> bool: ...
    @property
    def lock_reason(self) -> str: ...
    def unlock(self) -> None:
        """Let the system page it out. The memory stays."""

class OpenDescriptor:
    """A context manager that gives the number of a file's descriptor, which stays open within."""

    def __enter__(self) -> int: ...
    def __exit__(self, *exc_info: object) -> None: ...

class File:
    def __init__(
        self, path: bytes, mode: str, create: bool, truncate: bool, exclusive: bool, direct: bool, by_name: bool
    ) -> None: ...
    @property
    def direct(self) -> bool: ...
    @property
    def direct_reason(self) -> str: ...
    @property
    def wrote_buffered(self) -> bool: ...
    @property
    def alignment_bytes(self) -> int: ...
    @property
    def memory_alignment_bytes(self) -> int: ...
    def fileno(self) -> int: ...
    def descriptor(self) -> OpenDescriptor: ...
    def status(self) -> tuple[int, int, int, int, int]: ...
    def leave_name(self) -> None: ...
    def size_bytes(self) -> int: ...
    def preallocate(self, length_bytes: int) -> bool: ...
    def truncate(self, length_bytes: int) -> None: ...
    def check_written(self) -> None: ...
    def sync(self) -> None: ...

class Checksums:
    """What a file should hold: a CRC-32C of each block of its first `length_bytes`, in memory.

    Args:
        length_bytes: of the file, at most.
        block_bytes: a multiple of 4096 that divides the handle's `block_bytes`.
    """

    def __init__(self, length_bytes: int, block_bytes: int) -> None: ...
    @property
    def length_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def record(self, offset_bytes: int, data: bytes) -> None:
        """Note `data` as what the file holds from the start of a block on, to its end or where `data` ends."""

    def first_difference(self, offset_bytes: int, data: bytes) -> int:
        """Where the first block starts that is not as it was noted; where `data` ends if all are."""

    def joined(self, length_bytes: int) -> int:
        """The CRC-32C of the first `length_bytes`, as noted. ValueError where they were not written just so."""

class Transfer:
    @property
    def key(self) -> int: ...
    def done(self) -> bool: ...
    def failed(self) -> bool: ...
    def times_s(self) -> tuple[float, float]:
        """When it began and ended, by the clock of `time.perf_counter()`. Only once done."""

    def wait(self, timeout: float | None = None) -> int: ...

class FaultPlan:
    """What goes wrong on purpose, and how often: for tests. Probabilities are per request, drawn from `seed`.

    The n-th read or write request from now on, counted from 1 over the whole handle, fails with `fail_errno`;
    0 for none. Parts of one transfer and retries count singly. `reads` and `writes` are the requests seen.
    `einval` strikes direct requests only; `full` is the probability that a submission takes nothing.

    `bytes_per_second` caps the throughput of the handle, over all its threads, reads and writes together: a completion
    is held until what was submitted so far would have been moved at that rate, by the steady clock. 0: no limit, and
    what is held is over: so a test lets a drive stand still, and go on.
    """

    fail_read_at: int
    fail_write_at: int
    fail_errno: int
    bytes_per_second: int
    def __init__(
        self,
        *,
        seed: int = 0,
        short: float = 0.0,
        eio: float = 0.0,
        enospc: float = 0.0,
        eintr: float = 0.0,
        eagain: float = 0.0,
        einval: float = 0.0,
        full: float = 0.0,
        delay_us: int = 0,
        reorder: bool = False,
        fail_read_at: int = 0,
        fail_write_at: int = 0,
        fail_errno: int = 5,
        bytes_per_second: int = 0,
    ) -> None: ...
    @property
    def reads(self) -> int: ...
    @property
    def writes(self) -> int: ...

class Engine:
    def __init__(
        self,
        *,
        backend: str,
        block_bytes: int,
        queue_depth: int,
        threads: int,
        single_submit: bool,
        overlap_events: bool,
        faults: FaultPlan | None,
    ) -> None: ...
    def read(
        self,
        file: File,
        address: int,
        length_bytes: int,
        offset_bytes: int,
        key: int,
        checksums: Checksums | None,
    ) -> Transfer: ...
    def write(
        self,
        file: File,
        address: int,
        length_bytes: int,
        offset_bytes: int,
        key: int,
        checksums: Checksums | None,
    ) -> Transfer: ...
    def start_on_device(
        self,
        operation: str,
        file: RegisteredFile,
        address: int,
        length_bytes: int,
        offset_bytes: int,
        base: int,
        device: int,
    ) -> Transfer:
        """With the backend "cufile" only. `base` is 0 for memory that is not registered."""

    def take_finished(self) -> list[Transfer]: ...
    @property
    def broken(self) -> bool: ...
    def register_slab(self, slab: Slab) -> str: ...
    def unregister_slab(self, slab: Slab) -> None: ...
    def close(self) -> None: ...

def exchange(first: bytes, second: bytes) -> None:
    """renameat2(2) with RENAME_EXCHANGE."""

def keep_open(path: bytes) -> None:
    """Open the files `by_name` that are at an absolute path or beneath, and let them stay open."""

def probe_backend(name: str, fixed: bool) -> str: ...

class RegisteredFile:
    """Keeps the file open until it goes."""

class RegisteredMemory:
    """The memory must outlive it."""

class CuFile:
    """See csrc/cufile.h. `device` is a CUDA ordinal, negative for memory of no CUDA device."""

    @property
    def path(self) -> str: ...
    @property
    def version(self) -> int: ...
    def open_driver(self) -> str: ...
    def properties(self) -> tuple[int, int, int, int] | None:
        """Major and minor version of nvidia-fs, status flags, control flags."""

    def parameter(self, index: int) -> bool | None: ...
    def register_file(self, file: File, device: int) -> RegisteredFile: ...
    def register_memory(self, address: int, length_bytes: int, device: int) -> RegisteredMemory: ...

def load_cufile(names: list[str]) -> CuFile: ...

# codec
def split_master(master: int, param: int, low: int, ties: int, numel: int, threads: int) -> int:
    """See csrc/codec.h. Addresses, as ints; they are not checked. Returns the number of tie bits."""

def join_master(param: int, low: int, ties: int, tie_bits: int, master: int, numel: int, threads: int) -> None:
    """See csrc/codec.h. Raises ValueError if `low` has another number of ties than `tie_bits`."""

def encode_bf16(
    values: int, stored: int, numel: int, first: int, seed: int, name: int, step: int, parameter: int, threads: int
) -> None:
    """See csrc/bf16_codec.h. Addresses, as ints; they are not checked."""

def decode_bf16(stored: int, values: int, numel: int, threads: int) -> None:
    """See csrc/bf16_codec.h. Addresses, as ints; they are not checked."""

def encode_int8(
    values: int,
    codes: int,
    scales: int,
    numel: int,
    first: int,
    seed: int,
    name: int,
    step: int,
    parameter: int,
    threads: int,
) -> None:
    """See csrc/int8_codec.h. Addresses, as ints; they are not checked."""

def decode_int8(codes: int, scales: int, values: int, numel: int, threads: int) -> None:
    """See csrc/int8_codec.h. Addresses, as ints; they are not checked."""

def pack_record(
    data: int,
    length_bytes: int,
    end: int,
    pieces: Sequence[tuple[int, int, int]],
    tail: int,
    tail_bytes: int,
    threads: int,
) -> list[int]:
    """See csrc/packing.h. `data` is an address, which is not checked; pieces are offset, elements, table's offset."""

def packed_offsets(
    data: int, length_bytes: int, end: int, pieces: Sequence[tuple[int, int, int]], tail: int, tail_bytes: int
) -> list[int]:
    """See csrc/packing.h. Arguments as of `pack_record`."""

def unpack_record(
    data: int,
    length_bytes: int,
    end: int,
    pieces: Sequence[tuple[int, int, int]],
    tail: int,
    tail_bytes: int,
    threads: int,
) -> None:
    """See csrc/packing.h. Arguments as of `pack_record`."""

def packed_bytes(table: int, numel: int) -> int:
    """See csrc/packing.h. The address is not checked."""

def unpack_values(table: int, data: int, length_bytes: int, values: int, numel: int, threads: int) -> None:
    """See csrc/packing.h. Addresses, as ints; they are not checked."""

def packed_bf16_bytes_most(numel: int) -> int:
    """See csrc/bf16_packing.h."""

def pack_bf16(values: int, numel: int, packed: int, threads: int) -> int:
    """See csrc/bf16_packing.h. Addresses, as ints; they are not checked."""

def unpack_bf16(packed: int, length_bytes: int, values: int, numel: int, threads: int) -> None:
    """See csrc/bf16_packing.h. Addresses, as ints; they are not checked."""

def crc32c(address: int, length_bytes: int, seed: int = 0, threads: int = 1) -> int:
    """See csrc/crc32c.h. `seed` is the checksum of what came before."""

def crc32c_each(runs: Sequence[tuple[int, int]], threads: int) -> list[int]:
    """See csrc/crc32c.h. Each run is an address and a length in bytes."""

def crc32c_join(crc_a: int, crc_b: int, length_b_bytes: int) -> int:
    """The checksum of a followed by b, from those of both."""

def crc32c_by_table(address: int, length_bytes: int, seed: int = 0) -> int:
    """`crc32c` as it works on a processor without the instruction, for tests."""

def crc32(address: int, length_bytes: int, seed: int = 0) -> int:
    """See csrc/crc32.h. `seed` is the checksum of what came before."""

def crc32_by_table(address: int, length_bytes: int, seed: int = 0) -> int:
    """`crc32` as it works on a processor without the instructions, for tests."""

def address_of(buffer: object, writable: bool) -> tuple[int, int]:
    """Where the bytes of a contiguous buffer are, and how many. Errors of the buffer protocol."""

def copy_crc32(destination: int, source: int, length_bytes: int, seed: int = 0) -> int:
    """See csrc/crc32.h. Addresses, as ints; they are not checked."""

def prefault(address: int, length_bytes: int, threads: int) -> None:
    """See csrc/prefault.h."""

def prefault_huge(address: int, length_bytes: int) -> None:
    """See csrc/prefault.h."""

# end of codec

# native steps
class StepProgram:
    """See csrc/native_step.h."""

    def __init__(
        self,
        instructions: Sequence[tuple[int, int, int, int, int, int, Sequence[float]]],
        arrays: int,
        registers: int,
    ) -> None:
        """Of each instruction: opcode, out, a, b, c, contraction, constants; see csrc/step_program.h."""

_Job = tuple[
    StepProgram,
    int,
    int,
    int,
    int,
    int,
    int,
    int,
    int,
    bool,
    Sequence[int],
    Sequence[tuple[int, bool, bool, int, int, int, int, int, int, int]],
]

def run_step(jobs: Sequence[_Job], threads: int, instruction_set: int) -> list[tuple[int, int]]:
    """See csrc/native_step.h. A job: the fields of `StepJob` in order, addresses as ints, 0 for none. An array that is
    encoded: those of `EncodedArray`, with 1 for bf16, 2 for int8, and its key as seed, name, step, parameter.

    Returns of each job its new ties and the CRC-32C of its new bits. Raises ValueError as `run_step` there throws.
    """

class StepRun:
    """`run_step` in two parts: see csrc/native_step.h. One that is dropped waits."""

    def __init__(self, jobs: Sequence[_Job], threads: int, instruction_set: int) -> None: ...
    def wait(self) -> list[tuple[int, int]]: ...

def has_instruction_set(instruction_set: int) -> bool:
    """True if the processor has it: 0 AVX-512, 1 AVX2, 2 none in particular."""

def best_instruction_set() -> int:
    """The fastest that the processor has."""

def has_vendor_sqrt() -> bool:
    """True if a program can take roots as torch does: see csrc/vendor_sqrt.h. Torch is loaded before."""
