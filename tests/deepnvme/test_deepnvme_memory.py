"""Page-locked memory, bytes of tensors and device memory of DeepNVMe."""

from __future__ import annotations

import gc
import inspect
import os
from pathlib import Path

import pytest
import torch
from deepnvme_programs import (
    DEVICES,
    NEEDS_CUDA,
    NEEDS_LOCK,
    contents,
    full_errno,
    locked_bytes,
    run,
    settle,
)
from locked_memory import needs_locked_memory
from small_drives import random_bytes

from swapper import deepnvme
from swapper.deepnvme import (
    GDSBuilder,
    PinMemoryBuilder,
    aio_handle,
    cast_from_byte_tensor,
    cast_to_byte_tensor,
    gds_handle,
    locked_memory,
)
from swapper.errors import SwapIOError

pytestmark = pytest.mark.timeout(240)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


# --- Page-locked memory ---------------------------------------------------------------------------------------------


@NEEDS_LOCK
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_locked_tensor_is_what_was_asked_for(make: type[aio_handle], tmp_path: Path, dtype: torch.dtype) -> None:
    h = make()
    example = torch.empty(0, dtype=dtype, requires_grad=dtype.is_floating_point)
    for numel in (0, 1, 1024, 100_003):
        t = h.new_cpu_locked_tensor(numel, example)
        assert (t.dtype, t.shape, t.device.type, t.requires_grad) == (dtype, (numel,), "cpu", False)
        assert t._base is None and t.is_leaf and not cast_to_byte_tensor(t).any()
        assert locked_memory.address_of(t) % 4096 == 0
        assert h.is_pinned(t) and h.is_pinned(t[numel // 2 :])
        source = cast_from_byte_tensor(random_bytes(t.nbytes, 1).bitwise_and_(1), dtype)
        t.copy_(source)
        assert h.sync_pwrite(t, str(tmp_path / "file")) == 1
        cast_to_byte_tensor(t).zero_()
        assert h.sync_pread(t, str(tmp_path / "file")) == 1
        assert contents(t) == contents(source)
        assert h.free_cpu_locked_tensor(t) is True


@NEEDS_LOCK
@needs_locked_memory
@pytest.mark.unsanitized("it turns mlock into nothing")
def test_locked_is_what_the_system_says() -> None:
    before = locked_bytes()
    h = aio_handle()
    small = h.new_cpu_locked_tensor(1, torch.zeros(1))
    assert locked_bytes() - before == 4096  # no more than it needs: RLIMIT_MEMLOCK may be 64 KiB
    large = h.new_cpu_locked_tensor(1 << 20, torch.zeros(1))
    assert locked_bytes() - before == 4096 + (4 << 20)
    part = large[5:10]
    assert h.free_cpu_locked_tensor(large)
    assert locked_bytes() - before == 4096 and not h.is_pinned(large) and not h.is_pinned(part)
    large.fill_(3)  # still there
    del large
    assert part.tolist() == [3.0] * 5
    del small
    gc.collect()
    assert locked_bytes() == before


@NEEDS_LOCK
def test_freeing_what_is_not_locked_says_so() -> None:
    """Not an error: programs free what may or may not be locked, as DeepNVMe's own tests do."""
    h = aio_handle()
    t = h.new_cpu_locked_tensor(100, torch.zeros(1))
    assert h.free_cpu_locked_tensor(torch.zeros(100)) is False
    assert h.free_cpu_locked_tensor(torch.zeros(0)) is False
    assert h.free_cpu_locked_tensor(torch.zeros(3, device="meta")) is False
    assert h.free_cpu_locked_tensor(t[1:]) is False and h.is_pinned(t)
    assert h.free_cpu_locked_tensor(t.narrow(0, 0, 5)) is True
    assert h.free_cpu_locked_tensor(t) is False and not h.is_pinned(t)


@NEEDS_LOCK
def test_a_locked_tensor_of_one_handle_is_pinned_for_another(tmp_path: Path) -> None:
    a, b = aio_handle(), gds_handle()
    t = a.new_cpu_locked_tensor(10_000, torch.zeros(1)).fill_(2)
    assert b.is_pinned(t) and b.sync_pwrite(t, str(tmp_path / "file")) == 1
    assert b.free_cpu_locked_tensor(t) and not a.is_pinned(t)
    assert not a.is_pinned(torch.zeros(1)) and not a.is_pinned(torch.zeros(1, device="meta"))
    assert not a.is_pinned(torch.zeros(3).to_sparse())


PIN_INTERFACE = {
    "__init__": [],
    "new_cpu_locked_tensor": ["num_elem", "example_tensor"],
    "free_cpu_locked_tensor": ["locked_tensor"],
    "free_cpu_locked_tensor_by_ptr": ["address"],
    "is_pinned": ["buffer"],
}


def test_a_pin_handle_has_the_names_of_deepspeed() -> None:
    assert PinMemoryBuilder.NAME == "pin_memory" and PinMemoryBuilder().is_compatible()
    found = PinMemoryBuilder().load(verbose=False).pin_handle
    for method, names in PIN_INTERFACE.items():
        parameters = inspect.signature(getattr(found, method)).parameters
        assert [name for name in parameters if name not in ("self", "args", "kwargs")] == names


@NEEDS_LOCK
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16, torch.complex128])
def test_a_pin_handle_allocates_and_frees(dtype: torch.dtype) -> None:
    before = len(locked_memory._locked)
    h = PinMemoryBuilder().load().pin_handle()
    t = h.new_cpu_locked_tensor(num_elem=4096, example_tensor=torch.empty(0, dtype=dtype))
    assert (t.dtype, tuple(t.shape), t.requires_grad, t.data_ptr() % 4096) == (dtype, (4096,), False, 0)
    assert not t.any()
    assert h.is_pinned(t) and h.is_pinned(t.narrow(0, 16, 16)) and h.is_pinned(buffer=t.view(64, 64)[3])
    assert not h.is_pinned(torch.empty(4096, dtype=dtype)) and not h.is_pinned(torch.empty(3, device="meta"))
    assert h.free_cpu_locked_tensor(locked_tensor=t[1:]) is False
    assert h.free_cpu_locked_tensor(locked_tensor=t) is True
    assert h.free_cpu_locked_tensor(t) is False and not h.is_pinned(t)
    t.fill_(1)  # The memory is still there.
    empty = h.new_cpu_locked_tensor(0, t)
    assert empty.numel() == 0 and h.free_cpu_locked_tensor(empty)
    with pytest.raises(ValueError, match="num_elem: -1 is negative"):
        h.new_cpu_locked_tensor(-1, t)
    assert len(locked_memory._locked) == before


@NEEDS_LOCK
def test_a_pin_handle_frees_by_address_what_has_other_memory_now() -> None:
    h = PinMemoryBuilder().load().pin_handle()
    t = h.new_cpu_locked_tensor(100, torch.zeros(1))
    base, address = t.view(100), t.data_ptr()
    t.data = torch.zeros(100)
    assert h.free_cpu_locked_tensor(t) is False and h.is_pinned(base)
    assert h.free_cpu_locked_tensor_by_ptr(address + 4) is False
    assert h.free_cpu_locked_tensor_by_ptr(address=address) is True
    assert h.free_cpu_locked_tensor_by_ptr(address) is False and not h.is_pinned(base)


@NEEDS_LOCK
@pytest.mark.unsanitized("it turns mlock into nothing")
def test_memory_of_a_pin_handle_is_locked_until_its_last_view_is_gone() -> None:
    before = locked_bytes()
    t = PinMemoryBuilder().load().pin_handle().new_cpu_locked_tensor(1 << 20, torch.zeros(1))
    view = t[5:10]
    del t
    gc.collect()
    assert locked_bytes() - before == 4 << 20 and deepnvme.pin_handle().is_pinned(view)
    del view
    gc.collect()
    assert locked_bytes() == before


@NEEDS_LOCK
def test_memory_of_a_pin_handle_is_for_every_io_handle(make: type[aio_handle], tmp_path: Path) -> None:
    pin, h, path = deepnvme.pin_handle(), make(), str(tmp_path / "file")
    source, target = (pin.new_cpu_locked_tensor(100_001, torch.zeros(1)) for _ in range(2))
    source.copy_(torch.arange(100_001))
    assert h.is_pinned(source)
    assert h.async_pwrite(source, path) == 0 and h.async_pread(target, path) == 0 and h.wait() == 2
    assert torch.equal(source, target)
    assert h.free_cpu_locked_tensor(source) and not pin.is_pinned(source)
    other = h.new_cpu_locked_tensor(10, torch.zeros(1))
    assert pin.is_pinned(other) and pin.free_cpu_locked_tensor(other) and not h.is_pinned(other)


@NEEDS_LOCK
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_locked_memory_of_its_own() -> None:
    h = deepnvme.pin_handle()
    locked = h.new_cpu_locked_tensor(10, torch.zeros(1))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert not h.is_pinned(locked) and not h.free_cpu_locked_tensor(locked)
            own = [h.new_cpu_locked_tensor(10, torch.zeros(1)) for _ in range(3)]
            del locked
            gc.collect()
            assert all(h.is_pinned(t) for t in own) and all(h.free_cpu_locked_tensor(t) for t in own)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert h.is_pinned(locked) and h.free_cpu_locked_tensor(locked)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_torch_pinned_is_pinned() -> None:
    assert aio_handle().is_pinned(torch.zeros(10).pin_memory())
    assert not aio_handle().is_pinned(torch.zeros(10, device="cuda"))


@NEEDS_LOCK
def test_locked_memory_outlives_its_handle(tmp_path: Path) -> None:
    before = locked_bytes()
    h = aio_handle()
    t = h.new_cpu_locked_tensor(10_000, torch.zeros(1)).fill_(2)
    view = t.view(100, 100)[3]
    del h, t
    gc.collect()
    assert aio_handle().is_pinned(view) and view.tolist() == [2.0] * 100
    assert aio_handle().sync_pwrite(view, str(tmp_path / "file")) == 1
    del view
    gc.collect()
    assert locked_bytes() == before


@NEEDS_LOCK
def test_locked_memory_that_is_dropped_is_given_back_and_unregistered(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    h = aio_handle()
    locked, resident = locked_bytes(), resident_bytes()
    for i in range(40):
        t = h.new_cpu_locked_tensor(1 << 19, torch.zeros(1))
        h.async_pwrite(t.fill_(i), str(tmp_path / "file"))
        if i % 2:
            assert h.free_cpu_locked_tensor(t)
            assert h.wait() == 2
        del t
    assert locked_bytes() == locked and not locked_memory._locked
    assert resident_bytes() - resident < 40 << 20
    assert (tmp_path / "file").read_bytes()[:4] == contents(torch.tensor(39.0))


@NEEDS_LOCK
def test_more_locked_tensors_than_are_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = []
    real = aio_handle._handle_type.register
    monkeypatch.setattr(
        aio_handle._handle_type, "register", lambda self, slab: registered.append(slab.address) or real(self, slab)
    )
    h = aio_handle()
    tensors = [h.new_cpu_locked_tensor(1000, torch.zeros(1)).fill_(i) for i in range(locked_memory._MAX_REGISTERED + 6)]
    assert len(registered) == locked_memory._MAX_REGISTERED
    assert h.free_cpu_locked_tensor(tensors[0])
    tensors.append(h.new_cpu_locked_tensor(1000, torch.zeros(1)).fill_(len(tensors)))
    assert len(registered) == locked_memory._MAX_REGISTERED + 0  # the six beyond still count
    for i, t in enumerate(tensors):
        h.async_pwrite(t, str(tmp_path / "file"), 4000 * i)
    assert h.wait() == len(tensors)
    assert (tmp_path / "file").read_bytes() == b"".join(map(contents, tensors))


def test_memory_that_is_not_to_be_had_is_an_error() -> None:
    h = aio_handle()
    with pytest.raises(SwapIOError, match="pinned"):
        h.new_cpu_locked_tensor(1 << 50, torch.zeros(1))
    with pytest.raises(ValueError, match="negative"):
        h.new_cpu_locked_tensor(-1, torch.zeros(1))
    with pytest.raises(TypeError):
        h.new_cpu_locked_tensor(1.5, torch.zeros(1))  # type: ignore[arg-type]


@pytest.mark.unsanitized("it turns mlock into nothing")
def test_memory_that_cannot_be_locked_is_an_error() -> None:
    """In a process without CAP_IPC_LOCK, and with the RLIMIT_MEMLOCK of many containers."""
    run("""
import os, resource, torch
from swapper.deepnvme import aio_handle
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
h = aio_handle()
t = h.new_cpu_locked_tensor(40 << 10, torch.empty(0, dtype=torch.uint8))
try:
    h.new_cpu_locked_tensor(40 << 10, t)
except OSError as error:
    assert "RLIMIT_MEMLOCK" in str(error) and error.length_bytes == 40 << 10, error
else:
    raise AssertionError("was locked beyond the limit")
# What was freed does not count, though there is still a tensor of it.
assert h.free_cpu_locked_tensor(t)
t = h.new_cpu_locked_tensor(40 << 10, t)
assert h.is_pinned(t)
""")


# --- Bytes of tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_a_tensor_are_its_memory(dtype: torch.dtype, device: str) -> None:
    for shape in ((), (1,), (0,), (7,), (3, 5), (2, 0, 3), (2, 3, 4, 5)):
        numel = torch.Size(shape).numel()
        memory = random_bytes(numel * dtype.itemsize, 1).bitwise_and_(1).to(device)
        t = memory.view(dtype).reshape(shape)
        cast = cast_to_byte_tensor(t)
        assert (cast.dtype, cast.shape, cast.device) == (torch.uint8, (t.nbytes,), t.device)
        assert cast.data_ptr() == t.data_ptr() and torch.equal(cast, memory)
        back = cast_from_byte_tensor(cast, dtype)
        assert (back.dtype, back.shape, back.device) == (dtype, (numel,), t.device)
        assert back.data_ptr() == t.data_ptr()
        cast.fill_(1)  # seen in both
        assert contents(t) == contents(back) == b"\1" * t.nbytes


def test_bytes_of_several_tensors() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), torch.zeros((), dtype=torch.bool)]
    for several in (tensors, tuple(tensors)):
        cast = cast_to_byte_tensor(several)
        assert isinstance(cast, list) and [c.numel() for c in cast] == [12, 32, 1]
        assert [c.data_ptr() for c in cast] == [t.data_ptr() for t in tensors]
    assert cast_to_byte_tensor([]) == []


def test_bytes_keep_the_memory_of_their_tensor() -> None:
    t = torch.arange(100_000)
    cast = cast_to_byte_tensor(t[10:20])
    del t
    junk = [torch.full((100_000,), -1) for _ in range(4)]
    assert cast_from_byte_tensor(cast, torch.int64).tolist() == list(range(10, 20))
    del junk


def test_bytes_of_a_parameter_are_apart_from_autograd() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    cast = cast_to_byte_tensor(p)
    assert type(cast) is torch.Tensor and cast.grad_fn is None
    assert not cast.requires_grad and cast.data_ptr() == p.data_ptr()
    cast.zero_()
    assert not p.any()
    assert not cast_from_byte_tensor(cast, torch.float32).requires_grad


def test_what_has_no_bytes_in_one_piece_is_refused() -> None:
    square = torch.zeros(4, 4)
    for wrong in (square.t(), square[:, 1:], torch.zeros(3, dtype=torch.complex64).conj(), square.to_sparse()):
        with pytest.raises(ValueError, match=r"contiguous|dense|resolve_conj"):
            cast_to_byte_tensor(wrong)
        with pytest.raises(ValueError, match=r"contiguous|dense|resolve_conj"):
            cast_to_byte_tensor([square, wrong])
    for nothing in (3, "abc", [1, 2], None):
        with pytest.raises(TypeError, match="tensor"):
            cast_to_byte_tensor(nothing)  # type: ignore[call-overload]
    several = torch.zeros(16, dtype=torch.uint8)
    for wrong in (several[:7], several[1:9], several.view(4, 4), several[::2]):
        with pytest.raises(ValueError, match=r"elements|flat"):
            cast_from_byte_tensor(wrong, torch.float32)
    for nothing in (torch.zeros(4), b"abcd", None):
        with pytest.raises(TypeError, match="uint8"):
            cast_from_byte_tensor(nothing, torch.float32)  # type: ignore[arg-type]


# --- Device memory --------------------------------------------------------------------------------------------------


def test_only_device_memory_is_pinned_as_such() -> None:
    h = gds_handle()
    for method in (h.pin_device_tensor, h.unpin_device_tensor, h.free_pinned_device_tensor):
        with pytest.raises(ValueError, match="CUDA"):
            method(torch.zeros(3))
    with pytest.raises(ValueError, match="negative"):
        h.new_pinned_device_tensor(-1, torch.zeros(1))


@pytest.fixture(params=["mock", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    """A GPU, or memory of the host in its place, with a cuFile that works there: see test_gds.py."""
    if request.param == "cuda":
        return "cuda"
    request.getfixturevalue("mock")
    return "cpu"


def test_program_with_pinned_device_tensors(device: str, tmp_path: Path) -> None:
    h = GDSBuilder().load().gds_handle(4096, 2, True, True, 2)
    path, size = str(tmp_path / "file"), 500_000
    if device == "cuda":
        buffer = h.new_pinned_device_tensor(size, torch.empty(0, dtype=torch.uint8, device=device))
        other = h.new_pinned_device_tensor(100, torch.empty(0))
        assert (other.shape, other.dtype, other.device) == ((100,), torch.float32, buffer.device)
    else:
        assert GDSBuilder().is_compatible()
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        assert h.pin_device_tensor(buffer) is True
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((size,), torch.uint8, device)
    buffer.copy_(random_bytes(size))
    assert h.sync_pwrite(buffer, path) == 1
    assert h.async_pwrite(buffer[5000:], path, size) == 0 and h.wait() == 1
    assert Path(path).read_bytes() == contents(random_bytes(size)) + contents(random_bytes(size)[5000:])
    buffer.zero_()
    assert h.async_pread(buffer, path) == 0 and h.wait() == 1
    assert torch.equal(buffer.cpu(), random_bytes(size))
    assert h.unpin_device_tensor(buffer) == h._handle.gds_available
    assert h.free_pinned_device_tensor(buffer) is False
    buffer.zero_()
    assert h.sync_pread(buffer, path) == 1 and torch.equal(buffer.cpu(), random_bytes(size))


def test_device_tensors(make: type[aio_handle], device: str, tmp_path: Path) -> None:
    h = make(8192, 4, intra_op_parallelism=2)
    for size in (0, 1, 4097, 300_000):
        source = random_bytes(size, size).to(device)
        targets = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(3)]
        path = tmp_path / str(size)
        assert h.pwrite(source, str(path), True, True, 77) == 0 and h.wait() == 1
        for target in targets:
            h.async_pread(target, str(path), 77 if size else 0)
        assert h.wait() == 3
        assert path.read_bytes()[77:] == contents(source)
        assert all(torch.equal(source, target) for target in targets)
    # Overlapping: in order.
    h.async_pwrite(source, str(tmp_path / "file"))
    h.async_pwrite(targets[0].zero_()[:5000], str(tmp_path / "file"), 1000)
    h.async_pread(targets[1], str(tmp_path / "file"))
    h.async_pwrite(targets[1], str(tmp_path / "copy"))
    assert h.wait() == 4
    expected = contents(source[:1000]) + bytes(5000) + contents(source[6000:])
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes() == expected


def test_a_failure_with_device_tensors_is_raised(make: type[aio_handle], device: str, tmp_path: Path) -> None:
    h, t = make(), random_bytes(100_000).to(device)
    h.async_pwrite(t, "/dev/full", 100)
    h.async_pwrite(t, str(tmp_path / "file"))
    with pytest.raises(SwapIOError) as caught:
        h.wait()
    error = caught.value
    assert (error.errno, error.path, error.offset_bytes) == (full_errno(h), "/dev/full", 100)
    assert (tmp_path / "file").read_bytes() == contents(t)
    h.pwrite(t, str(tmp_path / "file"), True, True)
    settle(h)
    (tmp_path / "file").write_bytes(bytes(100_000))
    with pytest.raises(SwapIOError, match="other bytes"):
        h.wait()
