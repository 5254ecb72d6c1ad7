"""Stepping on segments gives the bits of stepping whole: the arithmetic of cuts, then the proof on real torch.

The tests with "differ" in their name show that other cuts do not, so that the matrix is known to be able to fail.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from swapper.optimizer.cuts import CUT_NUMEL, segment_cuts, segment_keeps_bits
from swapper.sizes import ALIGNMENT_BYTES, round_up

pytestmark = pytest.mark.packs_too

Cuts = Sequence[tuple[int, int]]
Snapshot = dict[str, torch.Tensor]

GRAIN_NUMEL = 32768
BITS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
LOW_PRECISION = (torch.bfloat16, torch.float16)


# --- the arithmetic ---------------------------------------------------------------------------------------------


def assert_tiles(cuts: Cuts, numel: int, numel_max: int) -> None:
    edges = [0, *(stop for _, stop in cuts)]
    assert [start for start, _ in cuts] == edges[:-1]
    assert edges[-1] == numel
    assert all(1 <= stop - start <= numel_max for start, stop in cuts)


def keeps_bits(numel: int, cuts: Cuts, *, threads: int) -> bool:
    return all(segment_keeps_bits(start, stop, numel, threads) for start, stop in cuts)


@settings(deadline=None)
@given(value=st.integers(0, 2**60), multiple=st.integers(1, 2**40))
def test_round_up_is_the_smallest_multiple_not_below(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@settings(deadline=None)
@given(numel=st.integers(0, 2**36), segments=st.integers(1, 300), excess=st.integers(0, 2**20))
@example(numel=0, segments=1, excess=0)
@example(numel=1, segments=1, excess=0)
def test_cuts_at_multiples_of_64_are_even_and_few(numel: int, segments: int, excess: int) -> None:
    numel_max = CUT_NUMEL + numel // segments + excess
    cuts = segment_cuts(numel, numel_max, low_precision=False, threads=7)
    assert_tiles(cuts, numel, numel_max)
    assert all(start % CUT_NUMEL == 0 for start, _ in cuts)
    lengths = [stop - start for start, stop in cuts]
    assert max(lengths, default=0) - min(lengths, default=0) <= 2 * CUT_NUMEL
    if numel <= numel_max:
        assert len(cuts) == min(numel, 1)
    else:
        assert len(cuts) == -(-numel // (numel_max // CUT_NUMEL * CUT_NUMEL))


@st.composite
def low_precision_plans(draw: st.DrawFn) -> tuple[int, int, int]:
    threads = draw(st.one_of(st.integers(1, 8), st.integers(1, 600)))
    numel = draw(st.one_of(st.integers(0, 300_000), st.integers(0, 2**36), st.integers(0, 2**20).map(lambda n: n * 64)))
    # Not so small that a plan has more segments than a test has time for.
    numel_max = CUT_NUMEL + numel // draw(st.integers(1, 500)) + draw(st.integers(0, 2 * GRAIN_NUMEL))
    return numel, numel_max, threads


@settings(max_examples=300, deadline=None)
@given(plan=low_precision_plans())
@example(plan=(38_945, 147, 128))
@example(plan=(GRAIN_NUMEL, 20_000, 2))
@example(plan=(GRAIN_NUMEL + 1, GRAIN_NUMEL, 2))
@example(plan=(18_271_439_681, 9_135_719_904, 589))
def test_low_precision_cuts_respect_the_chunks_of_parallel_for(plan: tuple[int, int, int]) -> None:
    numel, numel_max, threads = plan
    cuts = segment_cuts(numel, numel_max, low_precision=True, threads=threads)
    assert_tiles(cuts, numel, numel_max)
    assert keeps_bits(numel, cuts, threads=threads)
    if threads <= 512:  # more are served, with more segments
        chunks = min(threads, -(-numel // GRAIN_NUMEL))
        assert len(cuts) <= 2 * -(-numel // numel_max) + 2 * chunks


def scalar_tail(start: int, stop: int, threads: int, step_numel: int) -> set[int]:
    """The elements that a kernel over [start, stop) leaves to its scalar tails, told as ATen's source tells it."""
    numel = stop - start
    pieces = min(threads, -(-numel // GRAIN_NUMEL)) if numel > GRAIN_NUMEL else 1
    chunk = -(-numel // pieces)
    tail: set[int] = set()
    for begin in range(start, stop, chunk):
        end = min(stop, begin + chunk)
        tail.update(range(end - (end - begin) % step_numel, end))
    return tail


@settings(deadline=None)
@given(
    numel=st.integers(1, 800_000),
    numel_max=st.integers(2000, 300_000),
    threads=st.integers(1, 9),
    step_numel=st.sampled_from([4, 8, 16, 32, 64]),
)
def test_low_precision_cuts_keep_every_element_on_its_side(
    numel: int, numel_max: int, threads: int, step_numel: int
) -> None:
    cuts = segment_cuts(numel, numel_max, low_precision=True, threads=threads)
    by_segments = set().union(*(scalar_tail(start, stop, threads, step_numel) for start, stop in cuts))
    assert by_segments == scalar_tail(0, numel, threads, step_numel)


@settings(deadline=None)
@given(numel=st.integers(2, 400_000), threads=st.integers(1, 9), data=st.data())
def test_keeps_bits_agrees_with_the_tails_at_the_widest_step(numel: int, threads: int, data: st.DataObject) -> None:
    chunk = -(-numel // min(threads, -(-numel // GRAIN_NUMEL)))
    cut = data.draw(
        st.one_of(
            st.integers(1, numel - 1),
            st.sampled_from([*range(64, numel, 64)] or [1]),
            st.sampled_from([*range(chunk, numel, chunk)] or [1]),
        )
    )
    cuts = ((0, cut), (cut, numel))
    same = scalar_tail(0, cut, threads, 64) | scalar_tail(cut, numel, threads, 64) == scalar_tail(0, numel, threads, 64)
    assert same or not keeps_bits(numel, cuts, threads=threads)


def test_chunks_whose_tails_are_empty_are_no_reason_to_cut() -> None:
    # 4096 x 11008 in bf16 on 32 threads: each chunk is a multiple of 64, so the fewest segments will do.
    assert len(segment_cuts(4096 * 11008, 16 * 2**20, low_precision=True, threads=32)) == 3


def test_chunks_of_at_most_a_grain_share_a_segment() -> None:
    cuts = segment_cuts(1_500_001, 800_000, low_precision=True, threads=64)
    assert cuts == ((0, 23 * 32609), (23 * 32609, 1_500_001))


@pytest.mark.parametrize(
    ("numel", "numel_max", "threads", "message"),
    [(10, 63, 1, "room for 64"), (-1, 64, 1, "numel is -1"), (10, 64, 0, "threads is 0")],
    ids=["numel_max", "numel", "threads"],
)
def test_segment_cuts_refuses_what_cannot_be(numel: int, numel_max: int, threads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segment_cuts(numel, numel_max, low_precision=True, threads=threads)


# --- the proof on real torch ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer class and its flags."""

    name: str
    optimizer: type[torch.optim.Optimizer]
    flags: dict[str, Any]

    @property
    def fused(self) -> bool:
        return bool(self.flags.get("fused"))

    def make(self, params: list[torch.Tensor]) -> torch.optim.Optimizer:
        flags = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.flags.items()}
        return self.optimizer(params, **flags)


def _cases() -> Iterator[Case]:
    optim = torch.optim
    for foreach in (False, True):

        def case(name: str, cls: type[torch.optim.Optimizer], foreach: bool = foreach, **flags: Any) -> Case:
            return Case(name + "-foreach" * foreach, cls, {"lr": 1e-2, "foreach": foreach, **flags})

        yield case("adamw", optim.AdamW)
        yield case("adam-l2", optim.Adam, weight_decay=0.1)
        yield case("nadam-l2", optim.NAdam, weight_decay=0.1)
        yield case("radam-l2", optim.RAdam, weight_decay=0.1)
        yield case("adamax-l2", optim.Adamax, weight_decay=0.1)
        yield case("adadelta-l2", optim.Adadelta, lr=1.0, weight_decay=0.1)
        yield case("adagrad-l2", optim.Adagrad, weight_decay=0.1, lr_decay=0.01)
        yield case("sgd-nesterov-l2", optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01)
        yield case("rmsprop-centered-momentum-l2", optim.RMSprop, weight_decay=0.1, centered=True, momentum=0.9)
        yield case("rprop", optim.Rprop)
        yield case("asgd-l2", optim.ASGD, weight_decay=0.1, t0=1)
        yield case("sgd-tensor-lr", optim.SGD, lr=torch.tensor(1e-2), momentum=0.9, weight_decay=0.1)
        if not foreach:
            yield case("adamw-tensor-lr", optim.AdamW, lr=torch.tensor(1e-2))
            yield case("adam-amsgrad-maximize", optim.Adam, amsgrad=True, maximize=True)
            yield case(
                "nadam-decoupled-maximize", optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
            )
            yield case(
                "radam-decoupled-maximize", optim.RAdam, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
            )
            yield case("sgd", optim.SGD)
            yield case("sgd-l2-maximize", optim.SGD, weight_decay=0.1, maximize=True)
            yield case("sgd-momentum-dampening", optim.SGD, momentum=0.9, dampening=0.1)
            yield case("rmsprop-l2", optim.RMSprop, weight_decay=0.1)
    for name, cls, flags in (
        ("adamw", optim.AdamW, {}),
        ("adam-l2-tensor-lr", optim.Adam, {"weight_decay": 0.1, "lr": torch.tensor(1e-2)}),
        ("adam-amsgrad-maximize", optim.Adam, {"amsgrad": True, "maximize": True}),
        ("adagrad-l2", optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.01}),
        ("sgd-l2", optim.SGD, {"weight_decay": 0.1}),
        ("sgd-nesterov-l2", optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ):
        yield Case(name + "-fused", cls, {"lr": 1e-2, "fused": True, **flags})


CASES = tuple(_cases())


def cases_named(*names: str) -> list[Case]:
    by_name = {case.name: case for case in CASES}
    return [by_name[name] for name in names]


@functools.cache
def fused_sgd_of_halves_is_broken() -> bool:
    """Seen in torch 2.13: the vector loop never stores the parameter, and reads the momentum as if it were fp32."""
    param = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, fused=True).step()
    return bool((param == 1).all())


def torch_gets_wrong(case: Case, dtype: torch.dtype) -> bool:
    fused_sgd = case.fused and case.optimizer is torch.optim.SGD
    return fused_sgd and dtype in LOW_PRECISION and fused_sgd_of_halves_is_broken()


def cuts_for(case: Case, dtype: torch.dtype, numel: int, numel_max: int) -> Cuts:
    low_precision = dtype in LOW_PRECISION and not case.fused
    return segment_cuts(numel, numel_max, low_precision=low_precision, threads=torch.get_num_threads())


def tensor_at(values: torch.Tensor, offset_numel: int = 0) -> torch.Tensor:
    """A copy that starts `offset_numel` elements after a multiple of `ALIGNMENT_BYTES`."""
    item = values.element_size()
    raw = torch.empty((values.numel() + offset_numel) * item + 2 * ALIGNMENT_BYTES, dtype=torch.uint8)
    begin = -raw.data_ptr() % ALIGNMENT_BYTES + offset_numel * item
    return raw[begin : begin + values.numel() * item].view(values.dtype).copy_(values)


def is_scalar(value: torch.Tensor) -> bool:
    return value.dim() == 0


@functools.cache
def _noise(seed: int) -> torch.Tensor:
    return torch.randn(300_001, generator=torch.Generator().manual_seed(seed))


def start_and_gradients(numel: int, dtype: torch.dtype, steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return _noise(0)[:numel].to(dtype), [(0.1 * _noise(1 + i)[:numel]).to(dtype) for i in range(steps)]


def step_whole(case: Case, numel: int, dtype: torch.dtype, steps: int) -> Snapshot:
    start, gradients = start_and_gradients(numel, dtype, steps)
    param = tensor_at(start).requires_grad_()
    optimizer = case.make([param])
    for gradient in gradients:
        param.grad = tensor_at(gradient)
        optimizer.step()
    state = {k: torch.as_tensor(v) for k, v in optimizer.state[param].items() if v is not None}
    return {"param": param.detach(), **state}


def step_segments(
    case: Case,
    cuts: Cuts,
    numel: int,
    dtype: torch.dtype,
    steps: int,
    *,
    offset_numel: int = 0,
    at_once: bool = False,
) -> Snapshot:
    """As a swapper does it: views of the live tensors, state in aligned buffers, groups narrowed for each call.

    `offset_numel` puts the parameter and its gradient off alignment. `at_once` steps all segments in one call.
    """
    start, gradients = start_and_gradients(numel, dtype, steps)
    live = tensor_at(start, offset_numel)
    segments = [live[a:b].requires_grad_() for a, b in cuts]
    optimizer = case.make(segments)
    group = optimizer.param_groups[0]
    for gradient in gradients:
        live_gradient = tensor_at(gradient, 3 * offset_numel)
        for segment, (a, b) in zip(segments, cuts, strict=True):
            segment.grad = live_gradient[a:b]
        for batch in [segments] if at_once else [[segment] for segment in segments]:
            group["params"] = batch
            optimizer.step()
        for segment in segments:
            state = optimizer.state[segment]
            state.update({k: tensor_at(v) for k, v in state.items() if torch.is_tensor(v) and not is_scalar(v)})
    states = [{k: torch.as_tensor(v) for k, v in optimizer.state[s].items() if v is not None} for s in segments]
    joined = {"param": live}
    for key, first in states[0].items():
        if is_scalar(first):
            assert all(torch.equal(state[key], first) for state in states)
            joined[key] = first
        else:
            joined[key] = torch.cat([state[key] for state in states])
    return joined


def differences(one: Snapshot, other: Snapshot) -> dict[str, int]:
    """How many elements differ in bits, by tensor; only what differs."""
    assert one.keys() == other.keys()
    found = {}
    for key, a in one.items():
        b = other[key]
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype in BITS:
            a, b = a.view(BITS[a.dtype]), b.view(BITS[b.dtype])
        if count := int((a != b).sum()):
            found[key] = count
    return found


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def by_threads(*counts: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("threads", counts, ids=lambda t: f"{t}-threads", indirect=True)


def by_case(cases: Sequence[Case] = CASES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def by_dtype(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))


def _matrix() -> Iterator[Any]:
    for case in CASES:
        for dtype in BITS:
            # bf16 shows the most; on the CPU `foreach` calls the same kernels one after the other.
            counts = (3,) if case.flags.get("foreach") else (1, 2, 3) if dtype is torch.bfloat16 else (1, 3)
            for threads in counts:
                name = f"{case.name}-{str(dtype).removeprefix('torch.')}-{threads}-threads"
                yield pytest.param(case, dtype, threads, id=name)


@pytest.mark.parametrize(("case", "dtype", "threads"), list(_matrix()), indirect=["threads"])
def test_segments_step_to_the_same_bits(case: Case, dtype: torch.dtype, threads: int) -> None:
    if torch_gets_wrong(case, dtype):
        pytest.skip("this torch's fused SGD does not step bf16 and fp16 parameters")
    # Less than a vector; odd; the longest that is not split among threads; the shortest that is; ragged chunks.
    for numel, numel_max, at_once in (
        (1, 64, False),
        (31, 64, True),
        (4099, 640, False),
        (4099, 640, True),
        (GRAIN_NUMEL, 20_000, False),
        (GRAIN_NUMEL + 1, 20_000, True),
        (66_001, 30_000, False),
    ):
        cuts = cuts_for(case, dtype, numel, numel_max)
        segments = step_segments(case, cuts, numel, dtype, 2, offset_numel=1, at_once=at_once)
        assert not differences(step_whole(case, numel, dtype, 2), segments), (numel, cuts, at_once)


@by_threads(2, 3, 4)
@by_dtype(torch.float32, torch.bfloat16, torch.float16)
@by_case(cases_named("adamw", "adam-l2", "rmsprop-centered-momentum-l2", "sgd-nesterov-l2", "adamw-fused"))
def test_segments_that_are_split_among_threads_step_to_the_same_bits(
    case: Case, dtype: torch.dtype, threads: int
) -> None:
    numel, numel_max = 300_001, 120_000
    cuts = cuts_for(case, dtype, numel, numel_max)
    assert max(stop - start for start, stop in cuts) > GRAIN_NUMEL
    segments = step_segments(case, cuts, numel, dtype, 3, offset_numel=5)
    assert not differences(step_whole(case, numel, dtype, 3), segments)


@by_dtype(torch.float32, torch.bfloat16)
@by_case()
def test_an_empty_parameter_has_no_segments_and_nothing_to_step(case: Case, dtype: torch.dtype) -> None:
    assert cuts_for(case, dtype, 0, 64) == ()
    assert step_whole(case, 0, dtype, 1)["param"].numel() == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(CASES),
    dtype=st.sampled_from(list(BITS)),
    thread_count=st.integers(1, 4),
    numel=st.one_of(st.integers(1, 500), st.integers(1, 150_000)),
    parts=st.integers(1, 12),
    offset_numel=st.integers(0, 17),
    at_once=st.booleans(),
)
def test_any_segments_step_to_the_same_bits(
    case: Case, dtype: torch.dtype, thread_count: int, numel: int, parts: int, offset_numel: int, at_once: bool
) -> None:
    assume(not torch_gets_wrong(case, dtype))
    before = torch.get_num_threads()
    torch.set_num_threads(thread_count)
    try:
        cuts = cuts_for(case, dtype, numel, CUT_NUMEL + numel // parts)
        segments = step_segments(case, cuts, numel, dtype, 2, offset_numel=offset_numel, at_once=at_once)
        assert not differences(step_whole(case, numel, dtype, 2), segments)
    finally:
        torch.set_num_threads(before)


@by_dtype(torch.float32, torch.bfloat16)
@by_case(cases_named("adam-l2", "adamw-fused"))
def test_a_dense_parameter_of_any_strides_is_cut_in_the_order_of_its_memory(case: Case, dtype: torch.dtype) -> None:
    rows, columns = 67, 97
    numel = rows * columns
    start, gradients = start_and_gradients(numel, dtype, 2)
    memory = start.clone()
    param = memory.view(rows, columns).t().requires_grad_()
    optimizer = case.make([param])
    for gradient in gradients:
        param.grad = gradient.view(rows, columns).t()
        optimizer.step()
    segments = step_segments(case, cuts_for(case, dtype, numel, 640), numel, dtype, 2)
    assert not differences({"param": memory}, {"param": segments["param"]})


# --- other cuts differ ------------------------------------------------------------------------------------------


def need_some_difference(found: dict[str, int], why: str) -> None:
    if not found:
        pytest.skip(f"on this machine and with this torch the bits are the same: {why}")


@by_threads(1, 2)
@by_case(cases_named("adamw-fused", "adam-amsgrad-maximize-fused"))
def test_fused_steps_differ_where_cuts_are_no_multiples_of_64(case: Case, threads: int) -> None:
    cuts = [(a, min(20_011, a + 997)) for a in range(0, 20_011, 997)]
    found = differences(step_whole(case, 20_011, torch.float32, 3), step_segments(case, cuts, 20_011, torch.float32, 3))
    need_some_difference(found, "the scalar tail rounds as the vectors do")


@by_threads(1)
@by_dtype(torch.bfloat16, torch.float16)
@by_case(cases_named("adam-l2", "rmsprop-centered-momentum-l2"))
def test_low_precision_steps_differ_where_cuts_are_no_multiples_of_64(
    case: Case, dtype: torch.dtype, threads: int
) -> None:
    cuts = [(a, min(20_011, a + 997)) for a in range(0, 20_011, 997)]
    found = differences(step_whole(case, 20_011, dtype, 3), step_segments(case, cuts, 20_011, dtype, 3))
    need_some_difference(found, "the scalar tail rounds as the vectors do")


@by_threads(2, 3)
@by_dtype(torch.bfloat16, torch.float16)
@by_case(cases_named("adam-l2", "rmsprop-centered-momentum-l2"))
def test_low_precision_steps_differ_where_cuts_ignore_the_chunks(case: Case, dtype: torch.dtype, threads: int) -> None:
    cuts = segment_cuts(100_003, 20_000, low_precision=False, threads=threads)
    assert not keeps_bits(100_003, cuts, threads=threads)
    found = differences(step_whole(case, 100_003, dtype, 3), step_segments(case, cuts, 100_003, dtype, 3))
    need_some_difference(found, "the scalar tails of chunks round as the vectors do")


@by_threads(3)
@by_dtype(torch.bfloat16, torch.float16)
@by_case(cases_named("adam-l2", "rmsprop-centered-momentum-l2"))
def test_low_precision_steps_differ_where_a_segment_is_split_unevenly(
    case: Case, dtype: torch.dtype, threads: int
) -> None:
    # Every chunk starts a segment, and is cut at a multiple of 64. But 65600 elements are themselves stepped in
    # three chunks of 21867, which put scalar tails where the whole parameter has none.
    numel = 200_001
    chunk, first = numel // 3, 65_600
    cuts = [
        edge for start in range(0, numel, chunk) for edge in ((start, start + first), (start + first, start + chunk))
    ]
    assert first % CUT_NUMEL == 0 and not keeps_bits(numel, tuple(cuts), threads=threads)
    found = differences(step_whole(case, numel, dtype, 3), step_segments(case, cuts, numel, dtype, 3))
    need_some_difference(found, "the scalar tails of chunks round as the vectors do")
