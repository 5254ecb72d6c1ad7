"""What the simulated device promises to the tests that use it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerators import SETTINGS, simulated
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Tensors = Any  # a tensor, or a tree of lists of them


@pytest.fixture(autouse=True)
def sim() -> Iterator[Any]:
    """The module `sim_device`, in the mode "lazy". The host computes in one thread, as the device does."""
    module = simulated()
    torch.set_num_threads(1)  # Restored after each test.
    module.configure("lazy")
    module.violations()
    yield module
    module.set_limit()
    module.configure("eager")
    assert module.violations() == []


def flat(tree: Tensors) -> list[torch.Tensor]:
    return [tree] if isinstance(tree, torch.Tensor) else [tensor for part in tree for tensor in flat(part)]


# --- Late work ------------------------------------------------------------------------------------------------------


def test_without_a_wait_the_host_sees_the_values_before() -> None:
    source, target = torch.ones(1000, device="sim"), torch.zeros(1000).pin_memory()
    target.copy_(source, non_blocking=True)
    assert bool((target == 0).all())
    torch.accelerator.synchronize()
    assert bool((target == 1).all())


def test_without_a_wait_another_stream_sees_the_values_before() -> None:
    values, other = torch.zeros(1000, device="sim"), torch.Stream("sim")
    torch.accelerator.synchronize()
    with other:
        values.fill_(1)
        filled = torch.Event("sim")
        filled.record()
    assert values.sum().item() == 0
    torch.accelerator.current_stream().wait_event(filled)
    assert values.sum().item() == 1000


def test_a_kernel_reads_its_arguments_when_it_runs() -> None:
    """So what is written over something that a queued kernel has yet to read is seen."""
    values, result, other = torch.ones(1000, device="sim"), torch.zeros(1000, device="sim"), torch.Stream("sim")
    torch.accelerator.synchronize()
    with other:
        torch.mul(values, 2, out=result)
    values.fill_(7)
    torch.accelerator.current_stream().synchronize()
    other.synchronize()
    assert result.sum().item() == 14_000


def test_page_locked_memory_is_read_late_and_other_memory_at_once() -> None:
    for pinned in (False, True):
        source = torch.ones(1000).pin_memory() if pinned else torch.ones(1000)
        target = torch.zeros(1000, device="sim")
        target.copy_(source, non_blocking=True)
        source.fill_(7)
        assert target.sum().item() == (7000 if pinned else 1000)


def test_a_copy_that_blocks_is_over_when_it_returns() -> None:
    source, target = torch.ones(1000).pin_memory(), torch.zeros(1000, device="sim")
    target.copy_(source)
    source.fill_(7)
    back = torch.zeros(1000).pin_memory()
    back.copy_(target)
    assert back.sum() == 1000
    pageable = torch.zeros(1000)
    pageable.copy_(target, non_blocking=True)
    assert pageable.sum() == 1000


def test_host_memory_of_others_can_be_page_locked(sim: Any) -> None:
    memory = torch.zeros(1000)
    assert not memory.is_pinned()
    sim.host_register(memory.data_ptr(), memory.nbytes)
    assert memory.is_pinned() and memory[10:].is_pinned()
    memory.copy_(torch.ones(1000, device="sim"), non_blocking=True)
    assert memory.sum() == 0
    sim.host_unregister(memory.data_ptr())
    assert "were in flight" in sim.violations()[0] and memory.sum() == 1000
    with pytest.raises(RuntimeError, match="not page-locked"):
        sim.host_unregister(memory.data_ptr())


def test_page_locked_memory_outlives_its_copies() -> None:
    target = torch.zeros(1000, device="sim")
    target.copy_(torch.ones(1000).pin_memory(), non_blocking=True)
    assert target.sum().item() == 1000


@pytest.mark.parametrize("mode", ["eager", "random", "lazy"])
def test_an_event_is_reached_after_what_was_before_it(sim: Any, mode: str) -> None:
    sim.configure(mode)
    sim.sleep(1_000_000)
    event = torch.Event("sim")
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_who_polls_an_event_sees_it_reached() -> None:
    event = torch.Event("sim")
    torch.ones(10, device="sim")
    event.record()
    while not event.query():
        pass


def test_events_tell_the_time_between_them(sim: Any) -> None:
    first, second = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    first.record()
    sim.sleep(5000)
    second.record()
    second.synchronize()
    assert 5 <= first.elapsed_time(second) < 6


def test_a_seed_is_a_schedule(sim: Any) -> None:
    def seen(seed: int) -> list[int]:
        sim.configure("random", seed)
        torch.zeros(1, device="sim")
        counts = torch.zeros(1).pin_memory()
        result = []
        for number in range(50):
            counts.copy_(torch.full((1,), number, device="sim"), non_blocking=True)
            result.append(int(counts))
        return result

    assert seen(1) == seen(1) != seen(2)
    assert seen(3) != list(range(50))


def test_a_kernel_that_fails_late_raises_at_the_next_wait() -> None:
    torch.ones(5, device="sim").index_select(0, torch.tensor([7], device="sim"))
    with pytest.raises(RuntimeError, match=r"a kernel failed.*index_select"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_the_nth_kernel_or_copy_can_be_told_to_fail(sim: Any) -> None:
    if not hasattr(torch.ops.sim, "fail_at"):
        pytest.skip("it was built before")
    sim.configure("lazy")
    host, values = torch.zeros(5).pin_memory(), torch.ones(5, device="sim")
    torch.accelerator.synchronize()
    sim.fail_at(2)
    values.mul_(2)
    host.copy_(values, non_blocking=True)
    values.mul_(2)
    with pytest.raises(RuntimeError, match="copy: it was told to fail"):
        torch.accelerator.synchronize()
    assert sim.fail_at(0) == 3
    assert bool((host == 0).all()) and bool((values == 4).all())


# --- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_host_cannot_touch_device_memory() -> None:
    process = multiprocessing.get_context("spawn").Process(target=_touch)
    process.start()
    process.join()
    assert process.exitcode == -11


def _touch() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    simulated()
    ctypes.string_at(torch.ones(10, device="sim").data_ptr(), 1)


def test_fresh_memory_is_poisoned() -> None:
    assert bool(torch.empty(1000, device="sim").isnan().all())
    assert bool((torch.empty(1000, dtype=torch.int32, device="sim") == -1).all())


def test_memory_is_poisoned_when_its_stream_is_past_its_use() -> None:
    """So a stream that uses it later sees that it was not recorded, and one that was recorded does not."""
    for recorded in (False, True):
        values, result, other = torch.ones(1000, device="sim"), torch.zeros(1000).pin_memory(), torch.Stream("sim")
        torch.accelerator.synchronize()
        with other:
            result.copy_(values, non_blocking=True)
        if recorded:
            values.record_stream(other)
        del values
        torch.accelerator.current_stream().synchronize()
        other.synchronize()
        assert bool((result == 1).all()) if recorded else bool(result.isnan().all())


def test_writes_to_memory_that_was_freed_are_found(sim: Any) -> None:
    values, other = torch.ones(1000, device="sim"), torch.Stream("sim")
    torch.accelerator.synchronize()
    with other:
        values.fill_(5)
    del values
    torch.accelerator.current_stream().synchronize()
    assert "written to after it was freed" in sim.violations()[0]
    assert sim.violations() == []


def test_memory_that_is_freed_is_its_streams_at_once_and_no_other_streams() -> None:
    values, other, result = torch.ones(1000, device="sim"), torch.Stream("sim"), torch.zeros(1000).pin_memory()
    torch.accelerator.synchronize()
    with other:
        result.copy_(values, non_blocking=True)  # Nobody is told.
    address = values.data_ptr()
    del values
    with other:
        assert torch.empty(1000, device="sim").data_ptr() != address
    values = torch.full((1000,), 7.0, device="sim")
    assert values.data_ptr() == address
    torch.accelerator.current_stream().synchronize()
    other.synchronize()
    assert bool((result == 7).all())


def test_memory_that_is_recorded_comes_back_when_its_other_streams_have_come_so_far() -> None:
    values, other, result = torch.ones(1000, device="sim"), torch.Stream("sim"), torch.zeros(1000).pin_memory()
    torch.accelerator.synchronize()
    with other:
        result.copy_(values, non_blocking=True)
    values.record_stream(other)
    address = values.data_ptr()
    del values
    others = [torch.full((1000,), 7.0, device="sim") for _ in range(3)]
    torch.accelerator.current_stream().synchronize()
    assert address not in [each.data_ptr() for each in others] and bool((result == 0).all())
    other.synchronize()
    assert torch.empty(1000, device="sim").data_ptr() == address
    assert bool((result == 1).all())


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_uses_anothers_memory_waits_for_what_had_it_before(waits: bool, is_new: bool) -> None:
    source, other = torch.ones(1000 + is_new * 654_321).pin_memory(), torch.Stream("sim")
    before = [torch.zeros(1000, device="sim") for _ in range(2)]
    before[0] += 1
    address = before.pop().data_ptr()
    values = torch.empty(len(source), device="sim")
    assert (values.data_ptr() == address) != is_new
    if waits:
        other.wait_stream(torch.accelerator.current_stream())
    with other:
        values.copy_(source, non_blocking=True)
    other.synchronize()
    assert bool((values == 1).all()) == waits


def test_memory_of_many_streams_is_bounded() -> None:
    addresses = set()
    for number in range(400):
        with torch.Stream("sim"):
            values = torch.full((1 << 18,), float(number), device="sim")
            addresses.add(values.data_ptr())
            assert number % 50 or values.sum().item() == number << 18
    assert len(addresses) <= 257


def test_memory_that_is_made_longer_keeps_its_values() -> None:
    values = torch.arange(3, device="sim")
    values.resize_(5000)
    values[3:] = 7
    assert values.tolist() == [0, 1, 2] + [7] * 4997


def test_statistics_and_the_limit(sim: Any) -> None:
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    values = torch.zeros(1 << 20, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_allocated() == torch.sim.memory_allocated() == before + (1 << 20)  # type: ignore[attr-defined]
    del values
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + (1 << 20)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == before
    sim.set_limit(before + 4096)
    assert torch.zeros(4096, dtype=torch.uint8, device="sim").numel() == 4096
    with pytest.raises(torch.OutOfMemoryError, match="8192 bytes"):
        torch.zeros(8192, dtype=torch.uint8, device="sim")
    sim.set_limit(device="sim:1", length_bytes=0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1, device="sim:1")
    sim.set_limit(device="sim:1")


def test_the_nth_allocation_can_be_refused(sim: Any) -> None:
    if not hasattr(torch.ops.sim, "refuse_at"):
        pytest.skip("it was built before")
    sim.refuse_at(2)
    first = torch.empty(4, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4, device="sim")
    assert torch.empty(4, device="sim").data_ptr() != first.data_ptr()
    assert sim.refuse_at(0) == 3


# --- Devices, processes, random numbers -----------------------------------------------------------------------------


def test_two_devices() -> None:
    first = torch.arange(100.0, device="sim:0")
    second = first.to("sim:1")
    assert (first.device.index, second.device.index) == (0, 1)
    assert torch.equal(first.cpu(), second.cpu())
    with torch.accelerator.device_index(1):
        assert torch.zeros(1, device="sim").device.index == 1
    for other in (second, torch.ones(100)):
        with pytest.raises(RuntimeError, match="to be on the same device"):
            first + other
    model = nn.Linear(4, 4, device="sim:1")
    model(torch.ones(2, 4, device="sim:1")).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.device.index == 1


def test_a_model_is_moved_in_place() -> None:
    """As on CUDA, an optimizer that was made before still has its parameters."""
    model = nn.Linear(4, 4)
    parameters = list(model.parameters())
    for device in ("sim:1", "cpu", "sim:0"):
        model.to(device)(torch.ones(2, 4, device=device)).sum().backward()
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
        assert all(t is not None and str(t.device) == device for p in parameters for t in (p, p.grad))


def test_a_forked_child_is_refused() -> None:
    values = torch.ones(10, device="sim")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            values + 1
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        del values
        os._exit(0)
    os.close(writing)
    assert b"forked subprocess" in os.read(reading, 1000)
    assert os.waitpid(child, 0)[1] == 0
    os.close(reading)
    assert values.sum().item() == 10


def test_random_numbers_are_those_of_the_seed_however_late() -> None:
    def draw() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [torch.randn(50, device="sim"), torch.rand(50, device="sim"), torch.randperm(50, device="sim")]

    first, second = draw(), draw()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(torch.randn(50, device="sim"), torch.randn(50, device="sim"))
    generator = torch.Generator("sim").manual_seed(3)
    assert torch.equal(torch.randn(50, device="sim", generator=generator), first[0])
    state = generator.get_state()
    drawn = torch.rand(50, device="sim", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(50, device="sim", generator=generator), drawn)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(5, device="sim", generator=torch.Generator())


def test_checkpointing_drops_the_same_elements_again() -> None:
    x = torch.randn(1000, device="sim", requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    kept = y != 0
    assert torch.equal(kept, x.grad != 0) and 300 < int(kept.sum()) < 700


# --- Kernels --------------------------------------------------------------------------------------------------------


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def leaf(*shape: int) -> torch.Tensor:
    return some(*shape).requires_grad_()


INDICES = torch.tensor([3, 0, 5, 5, 1])
INTEGERS = torch.arange(-50, 50, dtype=torch.int32)

EXACT: dict[str, tuple[Callable[..., Tensors], list[torch.Tensor]]] = {
    "bits": (lambda a: [a << 3, a >> 2, a & 7, a | 1, a ^ 5, ~a, a.view(torch.int16), a.view(torch.uint8)], [INTEGERS]),
    "bits of floats": (
        lambda a: [a.view(torch.int32), a.bfloat16().view(torch.int16), (a.view(torch.int32) >> 16).to(torch.int16)],
        [some(40)],
    ),
    "integers": (
        lambda a: [a.sum(), a.sum(dtype=torch.int64), a.cumsum(0), a.max(), a.argmax(), *a.sort()],
        [INTEGERS],
    ),
    "dtypes": (
        lambda a: [a.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.half, torch.long, torch.bool)],
        [some(40)],
    ),
    "indices": (
        lambda a, k: [
            a[k],
            a[:5][k > 2],
            a.index_select(0, k),
            a.clone().index_add_(0, k, a[:5]),
            a.clone().index_put_((k,), a[0]),
            torch.where(a > 0, a, -a),
            a.masked_fill(a > 0, 1.0),
            a[torch.tensor([1, 2])],
            a[1:, ::2].t().contiguous(),
        ],
        [some(9, 5), INDICES],
    ),
    "shapes by values": (
        lambda a: [torch.unique(a), a.nonzero(), torch.bincount(a + 50), a[a > 5], a.repeat_interleave(2)],
        [INTEGERS],
    ),
    "reductions": (
        lambda a: [a.mean(0), a.std(), a.norm(), a.norm(3), a.prod(), a.logsumexp(0), *a.topk(2), a.isfinite().all()],
        [some(5, 5)],
    ),
    "shapes": (
        lambda a: [
            torch.cat([a, a]),
            torch.stack([a, a]),
            *a.split(2),
            a.flip(0),
            a.roll(1),
            a.repeat(2, 2),
            a.tril(),
            a.expand(3, 5, 5).contiguous(),
            a.unfold(0, 2, 1),
            a.diagonal(),
            torch.add(a, a, out=a.new_empty(0)),
        ],
        [some(5, 5)],
    ),
    "linear algebra": (
        lambda a: [
            torch.linalg.qr(a)[0],
            torch.linalg.svdvals(a),
            torch.einsum("ij,kj->ik", a, a),
            torch.outer(a[0], a[1]),
        ],
        [some(5, 5)],
    ),
    "complex": (
        lambda a: [a.conj() * 2, torch.view_as_real(a), a.real, a.imag, a.abs(), torch.fft.fft(a)],
        [torch.complex(some(8), some(8))],
    ),
    "foreach": (
        lambda a: [
            torch._foreach_norm([a, a * 2]),
            torch._foreach_lerp([a], [a * 2], 0.3),
            torch._foreach_sqrt([a.abs()]),
        ],
        [some(5, 5)],
    ),
    "conv": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        [leaf(2, 3, 8, 8), leaf(4, 3, 3, 3), leaf(4)],
    ),
    "transposed conv": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        [leaf(2, 3, 8, 8), leaf(3, 4, 3, 3), leaf(4)],
    ),
    "grouped conv": (lambda x, w: F.conv1d(x, w, groups=3), [leaf(2, 3, 8), leaf(3, 1, 3)]),
    "pooling": (
        lambda x: [
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 2),
            F.adaptive_avg_pool2d(x, 1),
            F.interpolate(x, scale_factor=2),
        ],
        [leaf(2, 3, 8, 8)],
    ),
    "norms": (
        lambda x: [
            F.layer_norm(x, (5,)),
            F.rms_norm(x, (5,)),
            F.group_norm(x, 3),
            F.batch_norm(x, None, None, training=True),
        ],
        [leaf(4, 6, 5)],
    ),
    "activations": (
        lambda x: (
            [f(x) for f in (F.gelu, F.relu, F.silu, F.elu, F.softplus, torch.tanh, torch.sigmoid, F.hardswish)]
            + [F.softmax(x, -1), F.log_softmax(x, -1), F.glu(x)]
        ),
        [leaf(4, 6)],
    ),
    "losses": (
        lambda x, k: [
            F.cross_entropy(x, k),
            F.nll_loss(F.log_softmax(x, 1), k, reduction="none"),
            F.mse_loss(x, x * 2),
            F.smooth_l1_loss(x, x * 3),
            F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
        ],
        [leaf(5, 6), INDICES],
    ),
    "embedding": (lambda w, k: [F.embedding(k, w), F.embedding_bag(k[None], w)], [leaf(9, 5), INDICES]),
    "checkpoint": (lambda x, w: checkpoint(lambda x: F.gelu(x @ w), x, use_reentrant=False), [leaf(4, 6), leaf(6, 6)]),
}


def run_on(device: str, f: Callable[..., Tensors], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results of `f` on `device`, and the gradients of what is given to it."""
    there = [tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in given]
    results = flat(f(*there))
    assert all(result.device.type == device for result in results)
    differentiable = [result for result in results if result.requires_grad]
    if differentiable:
        torch.stack([result.square().sum() for result in differentiable]).sum().backward()
    gradients = [tensor.grad for tensor in there if tensor.grad is not None]
    assert len(gradients) == sum(tensor.requires_grad for tensor in given)
    return [tensor.detach().cpu() for tensor in results + gradients]


@pytest.mark.parametrize("name", EXACT)
def test_kernels_have_the_bits_of_the_cpu(name: str) -> None:
    expected, found = run_on("cpu", *EXACT[name]), run_on("sim", *EXACT[name])
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("parameters", [None, torch.float32, "as the input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_batch_norm_has_the_bits_of_the_cpu(dtype: torch.dtype, parameters: Any, training: bool) -> None:
    def run(device: str) -> list[torch.Tensor]:
        layer = nn.BatchNorm2d(3, affine=parameters is not None).to(device)
        if parameters == "as the input":
            layer.to(dtype)
        layer.train(training)
        x = leaf(4, 3, 5, 5).to(device, dtype).detach().requires_grad_()
        y = layer(x)
        (y.float() * some(4, 3, 5, 5).to(device)).sum().backward()
        assert x.grad is not None
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        return [each.detach().cpu() for each in (y, x.grad, *gradients, *layer.buffers())]

    for a, b in zip(run("cpu"), run("sim"), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_integers_are_counted_as_on_cuda() -> None:
    """For which the CPU has no kernel: models that route tokens to experts do so."""
    counts = torch.histc(INDICES.to("sim"), bins=6, min=0, max=5)
    assert counts.dtype == torch.int64 and counts.tolist() == torch.bincount(INDICES, minlength=6).tolist()


def test_attention_is_close_to_the_cpu() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        return [F.scaled_dot_product_attention(q, k, v, is_causal=causal) for causal in (False, True)]

    given = [leaf(2, 2, 6, 4) for _ in range(3)]
    for a, b in zip(run_on("cpu", attend, given), run_on("sim", attend, given), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_have_the_bits_of_the_cpu(make: Callable[..., torch.optim.Optimizer]) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, results = nn.Embedding(9, 5, sparse=True).to(device), []
        optimizer = make(layer.parameters(), lr=0.1)
        for _ in range(2):
            for indices in ([3, 0, 5, 5, 1], [2, 2, 8, 0, 1]):
                layer(torch.tensor(indices).to(device)).square().sum().backward()
            gradient = layer.weight.grad
            assert gradient is not None and gradient.is_sparse and gradient.device.type == device
            results += [gradient.to_dense().cpu(), gradient.coalesce().values().cpu()]
            optimizer.step()
            optimizer.zero_grad()
        return [*results, layer.weight.detach().cpu()]

    assert all(torch.equal(a, b) for a, b in zip(train("cpu"), train("sim"), strict=True))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_close_to_the_cpu(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer = kind(6, 7, 2, batch_first=True)
    names = [name for name, _ in layer.named_parameters()]
    on_device = {"cpu": layer, "sim": kind(6, 7, 2, batch_first=True, device="sim")}

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> Tensors:
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(on_device[x.device.type], values, (x,))[0]

    given = [leaf(3, 5, 6), *(p.detach().clone().requires_grad_() for p in layer.parameters())]
    for a, b in zip(run_on("cpu", run, given), run_on("sim", run, given), strict=True):
        torch.testing.assert_close(a, b)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": lambda p: torch.optim.NAdam(p, foreach=False),
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_the_bits_of_the_cpu(name: str) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8).to(device)
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        for step in range(3):
            x = some(4, 8).mul(step + 1).to(device)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                return loss

            optimizer.step(closure)
        return [p.detach().cpu() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train("cpu"), train("sim"), strict=True))


@pytest.mark.parametrize("settings", ["sim-lazy", "sim-random", "sim-poison"])
@pytest.mark.parametrize("autocast", [False, True])
def test_training_has_the_bits_of_the_cpu_however_late_memory_is_used(sim: Any, settings: str, autocast: bool) -> None:
    """A program that waits and records where it should: its batches come on a stream of their own, by memory of theirs.

    With autocast those of a device where all is done at once, as the CPU's own lists of operators are others.
    """

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler(device, enabled=autocast, init_scale=256.0)
        batches = [some(8, 16) * factor for factor in (1, 2, 3, 4, 5, 6)]
        losses = []
        if device == "sim":
            batches = [batch.pin_memory() for batch in batches]
            copies = torch.Stream("sim")
        for batch in batches:
            x = batch
            if device == "sim":
                with copies:
                    x = batch.to("sim", non_blocking=True)
                    x = x * 1
                torch.accelerator.current_stream().wait_stream(copies)
                x.record_stream(torch.accelerator.current_stream())
            with torch.autocast(device, torch.float16, enabled=autocast):
                loss = (model(x) - x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
            del x, loss
        return [each.detach().cpu() for each in (*model.parameters(), *losses)]

    sim.configure("eager")
    expected = train("sim" if autocast else "cpu")
    sim.configure(**SETTINGS[settings])
    assert all(torch.equal(a, b) for a, b in zip(expected, train("sim"), strict=True))


def test_autocast_and_a_scaler() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 8)).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("sim", init_scale=256.0)
    for factor in (1.0, float("inf"), 1.0):
        with torch.autocast("sim", torch.float16):
            y = model(torch.randn(2, 3, 8, 8, device="sim"))
            loss = F.cross_entropy(y, torch.zeros(2, dtype=torch.long, device="sim"))
        assert (y.dtype, loss.dtype) == (torch.float16, torch.float32)
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 128


def test_kernels_wait_for_nothing_but_values(sim: Any) -> None:
    """Shapes are known without them, so training makes the host wait only where a program asks for a value."""
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    before = sim.waiting_operators()  # Of other tests.
    begun = torch.Event("sim")
    torch.accelerator.synchronize()
    sim.sleep(1_000_000)
    begun.record()
    model(torch.randn(2, 5, 16, device="sim")).square().mean().backward()
    optimizer.step()
    assert not begun.query()
    assert sim.waiting_operators() == before


def test_bits_are_those_of_one_thread() -> None:
    """Whichever thread runs a kernel, and however many it may use."""
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    matrix = torch.randn(300, 500, generator=torch.Generator().manual_seed(0))
    before, found, on_host = torch.get_num_threads(), [], []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            on_host.append(values.sum().item())
            found.append((values.to("sim").sum().item(), (matrix.to("sim") @ matrix.to("sim").t()).cpu()))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(set(on_host)) > 1  # Else this tells nothing.
    for total, product in found:
        assert total == on_host[0] and torch.equal(product, found[0][1])
