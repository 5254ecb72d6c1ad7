"""Probes an optimizer: learns the layout of its state, and whether stepping in parts keeps its bits.

A probe runs the user's own class with the user's own options on small tensors of our own. It touches neither the user's
parameters nor the global random state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig
from swapper.errors import ConfigError, show
from swapper.io.devices import is_accelerator
from swapper.optimizer.aliases import StateBefore
from swapper.optimizer.cuts import segment_cuts
from swapper.optimizer.int8_codec import blocks_of
from swapper.optimizer.probe_gradients import CHANGES, orthogonal_to, sizes_of
from swapper.optimizer.single_settings import Settings
from swapper.optimizer.state_shapes import shape_of_state, two_like
from swapper.optimizer.step_arguments import judge_closure_uses, tell_of_result
from swapper.optimizer.step_function import has_step_of_torch, unhooked_step
from swapper.optimizer.twin import PRIMES, Twin, equal, own_numbers, package_of, same_bits, seeded, small_shape
from swapper.storage.backward_agreement import have_all_ranks
from swapper.tensors.reduced import check_reduction
from swapper.tensors.sharded import Sharding, check_sharding, is_sharded, local_of
from swapper.tensors.strides import contiguous_stride, has_ordinary_class, is_dense, is_plain

__all__ = [
    "ENCODED_DTYPES",
    "LOW_PRECISION",
    "StateSpec",
    "has_only_elementwise_code",
    "is_elementwise",
    "is_stepped_by_all",
    "keeps_bits",
    "learn_state",
    "refuse_broken_fused",
    "refuse_lazy",
    "refuse_parameter",
    "refuse_unsupported",
    "register_elementwise",
    "same_bits_for_strides",
    "state_after_steps",
    "try_sharded",
]


ENCODED_DTYPES = {"bf16": torch.bfloat16, "int8": torch.uint8}
"""The element type of each lossy encoding in records."""

_CPU = torch.device("cpu")
_STEPS = 3
LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes that may have masters, and whose bits depend on more than elements: see `cuts`."""
_REAL_NUMEL = 1 << 18
"""Parameters of at most so many elements are tried in their own shape."""
_LARGER_NUMEL_MAX = 1 << 22
"""The most elements that another one is tried with, to see whether its state is other than that of a tiny one."""
_COUPLED_STEPS = 8
"""Enough for what adapts slowly, like D-Adaptation and Prodigy, to have moved."""
_SHAPE = (3, 7, 17)
"""The last sizes of a parameter that is tried whole and cut: 357 elements."""
_elementwise: set[type[Optimizer]] = {
    getattr(torch.optim, name)
    for name in ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
}
_whole = {getattr(torch.optim, name) for name in ("Adafactor", "SparseAdam", "Muon") if hasattr(torch.optim, name)}
"""Known to be per parameter, not per element. `Muon` is there since torch 2.9."""


@dataclass(frozen=True)
class StateSpec:
    """One tensor of the state of one parameter.

    Attributes:
        key: its name in the state.
        dtype: as the class has it.
        shape, stride: in elements; the stride is that of the parameter where the shapes are equal.
        encoding: how it is stored: "exact", or float32 as "bf16", "int8" or "packed". See `encodings`.
        on_accelerator: the class has it there, where it steps; else on the CPU.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    encoding: str = "exact"
    on_accelerator: bool = False

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes, as the class has it, without padding."""
        return self.numel * self.dtype.itemsize

    @property
    def is_rounded(self) -> bool:
        """True if its encoding is lossy. Then it has that in records in memory, too."""
        return self.encoding in ENCODED_DTYPES

    @property
    def is_packed(self) -> bool:
        """True if it is packed while it is on the drive. See [Note: packed records] in `packing`."""
        return self.encoding == "packed"

    @property
    def stored_dtype(self) -> torch.dtype:
        """The element type in the record."""
        return ENCODED_DTYPES.get(self.encoding, self.dtype)

    @property
    def stored_bytes(self) -> int:
        """Its bytes in the record, without padding and scales."""
        return self.numel * self.stored_dtype.itemsize

    @property
    def scales_numel(self) -> int:
        """Its scales in the record, float32: one for each block of an "int8"."""
        return blocks_of(self.numel) if self.encoding == "int8" else 0


def register_elementwise(cls: type[Optimizer]) -> type[Optimizer]:
    """Say that `cls` computes each element from the same element of its state, gradient and parameter alone.

    Its parameters are then cut into segments, so that the largest no longer decides how much memory a step takes. A
    probe still checks it, as far as small tensors show: where bits differ, whole parameters are used, and a class that
    looks at all parameters is refused. Can be used as a decorator. Raises ConfigError if it is no class of optimizers.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise ConfigError(f"{show(cls)} is not a class of optimizers; call register_elementwise(type(optimizer))")
    _elementwise.add(cls)
    return cls


def is_elementwise(optimizer: Optimizer) -> bool:
    """True if the optimizer's `step` is that of a class known to be elementwise; a subclass with its own is not."""
    return _is_one_of(optimizer, _elementwise)


def has_only_elementwise_code(cls: type[Optimizer]) -> bool:
    """True if `cls` is known to be elementwise, or a subclass of such a one that adds no code but `__init__`."""
    own = ("__init__", "step")  # torch hooks `step` in a subclass; whose it is, `is_elementwise` says.
    for base in cls.__mro__:
        if base in _elementwise:
            return True
        if any(callable(value) or isinstance(value, property) for key, value in vars(base).items() if key not in own):
            return False
    return False


def refuse_broken_fused(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Raise `ConfigError` for a class whose fused kernels on the CPU do not step parameters of a dtype."""
    if isinstance(optimizer, torch.optim.SGD) and dtype in LOW_PRECISION:
        raise ConfigError(
            f"SGD(fused=True) leaves {dtype} parameters on the CPU unchanged (a defect of torch 2.13), so there is "
            "nothing to be exact to; use fused=False"
        )


def refuse_lazy(optimizer: Optimizer) -> None:
    """Raise `ConfigError` if a parameter has no shape yet."""
    if any(torch.nn.parameter.is_lazy(p) for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError("a parameter has no shape before the model's first forward (nn.LazyLinear): call it first")


def refuse_parameter(optimizer: Optimizer, parameter: torch.Tensor, config: OffloadConfig, remote: bool) -> None:
    """Refuse a parameter that cannot be stepped in memory of ours.

    Raises:
        ConfigError: it is of a tensor subclass, or sparse. Or it is a DTensor, and has other placements than can be
            swapped, or is to be stepped in backward, or its class needs it on its device.
    """
    check_sharding(parameter)
    local = local_of(parameter)
    if not is_plain(local) or local.layout is not torch.strided:
        raise ConfigError(
            f"a parameter holds a {type(local.data).__name__} of layout {local.layout}; only plain strided tensors, "
            "and DTensors of those, can be swapped"
        )
    if local is parameter:
        of_whom = type(parameter).__module__.partition(".")[0]
        if config.offload_optimizer.step_in_backward and of_whom not in ("torch", "swapper"):
            raise ConfigError(
                f"offload_optimizer.step_in_backward: true: a parameter is a {type(parameter).__name__}, and only "
                "gradients of ordinary parameters can be taken in backward; set it to false"
            )
        return
    what = f"a parameter is a DTensor of shape {tuple(parameter.shape)}"
    if remote and not is_elementwise(optimizer):
        raise ConfigError(
            f"offload_optimizer.step_device: {what} on {local.device}, and {type(optimizer).__name__}, which is not "
            "known to be elementwise, has to be stepped there; set it to device, or use an elementwise class"
        )
    gradients = config.offload_gradient.device
    if gradients == "nvme" or (gradients == "cpu" and is_accelerator(local.device)):
        check_reduction()
    if config.offload_optimizer.step_in_backward and not is_elementwise(optimizer):
        raise ConfigError(
            f"offload_optimizer.step_in_backward: true: {what}, and {type(optimizer).__name__}, which is not known to "
            "be elementwise, has collectives that backward must not have in between; set it to false"
        )


def try_sharded(optimizer: Optimizer) -> None:
    """Try a class that is not known to be elementwise on small DTensors like those that it has. Collective.

    Raises:
        ConfigError: its step fails on them, as it would without swapper.
    """
    tried = []
    for group in optimizer.param_groups if not is_elementwise(optimizer) else ():
        for p in filter(is_sharded, group["params"]):
            check_sharding(p)
            like = Sharding.of(p)
            is_small = p.numel() <= _REAL_NUMEL
            kind = like.mesh, like.placements, p.shape if is_small else like.small_part(), p.dtype
            if kind in tried:
                continue
            tried.append(kind)
            shape = local_of(p).shape if is_small else like.small_part()
            parts = [seeded(shape, p.dtype, seed, local_of(p).device) for seed in range(3)]
            values, *gradients = map(like.around if is_small else like.over_parts, parts)
            twin = Twin(optimizer, group, [values])
            for gradient in gradients:
                twin.step([gradient])


def is_stepped_by_all(optimizer: Optimizer) -> bool:
    """True if all ranks step `optimizer` together, and no step of theirs has a collective: then they can agree."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return have_all_ranks(parameters) and is_elementwise(optimizer)


def _is_one_of(optimizer: Optimizer, classes: set[type[Optimizer]]) -> bool:
    step = unhooked_step(type(optimizer))
    return any(isinstance(optimizer, cls) and unhooked_step(cls) is step for cls in classes)


def learn_state(
    optimizer: Optimizer,
    group: dict[str, Any],
    like: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    settings: Settings | None = None,
) -> tuple[StateSpec, ...]:
    """The tensors that the state of a parameter will hold once it was stepped.

    For a large parameter sizes are replaced by small primes in the probe, equal sizes by equal ones, and back in the
    state that comes of it.

    Args:
        optimizer: the user's.
        group: the parameter group that the parameter is in.
        like: the parameter: its shape, and its strides for state of the same shape. Its data are not read. A DTensor is
            stepped as such: the state is what this rank has of it.
        dtype: that of the parameter, or of its master, which the step will see.
        device: where the step will be.
        settings: of the parameter alone; see `single_settings`.

    Raises:
        ConfigError: the class fails in the probe.
    """
    sizes = sorted({size for size in like.shape if size > 1})
    if like.numel() <= _REAL_NUMEL:
        sizes = []
    small = {size: min(PRIMES[i], size) if i < len(PRIMES) else size for i, size in enumerate(sizes)}
    if len(set(small.values())) < len(small):
        small = {size: size for size in sizes}
    shape, whole = tuple(small.get(size, size) for size in like.shape), tuple(like.shape)
    state_at = functools.partial(_state_at, optimizer, group, dtype, device, settings)
    state = state_at(shape)
    shapes = {key: _scaled(tuple(value.shape), shape, whole) for key, value in state.items()}
    if sizes and not is_sharded(like) and not has_step_of_torch(optimizer):
        state, shapes = _seen_larger(state_at, shape, whole, state, shapes)
    local = local_of(like)
    specs = []
    for key, value in state.items():
        # Of a DTensor, other state is taken to be whole on each rank.
        full = tuple(local.shape) if shapes[key] == whole else shapes[key]
        same = full == tuple(local.shape) and is_dense(local)
        stride = local.stride() if same else contiguous_stride(full)
        specs.append(StateSpec(key, value.dtype, full, stride, on_accelerator=not value.is_cpu))
    return tuple(specs)


def _state_at(
    optimizer: Optimizer,
    group: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    settings: Settings | None,
    shape: tuple[int, ...],
) -> dict[str, torch.Tensor]:
    """The tensors of the state of a parameter of `shape`.

    Raises:
        ConfigError: the class fails, or has tensors of a class of somebody's, of which there is more than values.
    """
    twin = Twin(optimizer, group, [seeded(shape, dtype, 0, device)], settings=settings)
    for step in range(_STEPS):
        twin.step([seeded(shape, dtype, step + 1, device)])
    found = {k: v for k, v in twin.optimizer.state[twin.parameters[0]].items() if isinstance(v, torch.Tensor)}
    for key, value in found.items():
        if not is_sharded(value) and not has_ordinary_class(value):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps its state {key!r} in a {type(value).__name__}, which cannot be "
                "swapped; take a class of torch.optim, whose state has as few bytes with offload_optimizer.encoding: "
                "int8 (or bf16), or set offload_optimizer.device to none"
            )
    return found


def _scaled(state: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of state for a parameter of shape `whole`, where that for `shape` is `state`."""
    if state == (math.prod(shape),):
        return (math.prod(whole),)
    large = dict(zip(shape, whole, strict=True))
    return tuple(large.get(size, size) for size in state)


def _seen_larger(
    state_at: Callable[[tuple[int, ...]], dict[str, torch.Tensor]],
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    state: dict[str, torch.Tensor],
    shapes: dict[str, tuple[int, ...]],
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
    """`state` and `shapes`; or, where the class has other state from some size on, that."""
    like = two_like(whole)
    if math.prod(like[1]) > _LARGER_NUMEL_MAX:
        return state, shapes
    first = state_at(like[0])
    if first.keys() == state.keys() and all(
        (value.dtype, value.shape) == (state[key].dtype, _scaled(tuple(state[key].shape), shape, like[0]))
        for key, value in first.items()
    ):
        return state, shapes
    second = state_at(like[1])
    if any(key not in second or second[key].dtype != value.dtype for key, value in first.items()):
        return state, shapes
    found = {
        key: shape_of_state(whole, like, (tuple(value.shape), tuple(second[key].shape))) for key, value in first.items()
    }
    told = {key: full for key, full in found.items() if full is not None}
    return (first, told) if len(told) == len(found) else (state, shapes)


def state_after_steps(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The state of an fp32 parameter of `shape` on the CPU when a `Twin` has stepped it some times."""
    twin = Twin(optimizer, group, [seeded(shape, torch.float32, 0)])
    for step in range(_COUPLED_STEPS):  # `RAdam` does something else in its first five.
        twin.step([seeded(shape, torch.float32, step + 1)])
    return dict(twin.optimizer.state[twin.parameters[0]])


def keeps_bits(
    optimizer: Optimizer,
    group: dict[str, Any],
    dtype: torch.dtype,
    threads: int,
    low_precision: bool,
    device: torch.device = _CPU,
    dims: int = 1,
) -> bool:
    """True if this class, with these options, gives the same bits in segments as on the whole parameter.

    One whose step is not torch's is tried with more: a parameter of as many dimensions, for it may take rows for
    something, and gradients, and parameters, that it may look at whole. See `probe_gradients`.

    Args:
        threads, low_precision: see `segment_cuts`.
        device: where the class will step.
        dims: dimensions of the parameter.
    """
    numel = (32768 * threads if low_precision else 0) + math.prod(_SHAPE)
    cuts = segment_cuts(numel, numel // 2, low_precision=low_precision, threads=threads)
    start = seeded((numel,), dtype, 0, device)
    gradients = [seeded((numel,), dtype, step + 1, device) for step in range(_STEPS)]
    if not _same_in_parts(optimizer, group, start, gradients, cuts):
        return False
    if has_step_of_torch(optimizer):
        return True
    numel = math.prod(_SHAPE)
    cuts = segment_cuts(numel, numel // 2, low_precision=low_precision, threads=threads)
    shape = (*[1] * (dims - len(_SHAPE)), *_SHAPE) if dims > 2 else (math.prod(_SHAPE[:2]), _SHAPE[2])
    start = seeded(shape if dims > 1 else (numel,), dtype, 0, device)
    gradients = [seeded(tuple(start.shape), dtype, step + 1, device) for step in range(_STEPS)]
    kinds = [(start * size, [gradient * size for gradient in gradients]) for size in (1.0, *sizes_of(dtype))]
    for change in CHANGES.values():
        changed = [gradient.clone() for gradient in gradients]
        for gradient in changed:
            change(gradient.view(-1)[: numel // 2])  # The first segment is all of that.
        kinds.append((start, changed))
    kinds.append((start, [orthogonal_to(start, gradient) for gradient in gradients]))
    try:
        return all(_same_in_parts(optimizer, group, *kind, cuts) for kind in kinds)
    except ConfigError:  # It takes none of this kind, and is to say so before it has stepped a part.
        return False


def _same_in_parts(
    optimizer: Optimizer,
    group: dict[str, Any],
    start: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    cuts: Sequence[tuple[int, int]],
) -> bool:
    """True if a parameter and its parts, which are 1-D, have the same bits after a step with each gradient."""
    whole = Twin(optimizer, group, [start.clone()])
    parts = Twin(optimizer, group, [start.view(-1)[i:j].clone() for i, j in cuts])
    parts.take_state(whole, cuts)
    for gradient in gradients:
        whole.step([gradient])
        parts.step_apart([gradient.view(-1)[i:j] for i, j in cuts])
    joined = torch.cat([p.detach() for p in parts.parameters])
    if not same_bits(whole.parameters[0].detach(), joined):
        return False
    state, of_parts = whole.optimizer.state[whole.parameters[0]], [parts.optimizer.state[p] for p in parts.parameters]
    if any(each.keys() != state.keys() for each in of_parts):  # Of matrices it has other state than of vectors.
        return False
    for key, value in state.items():
        pieces = [each[key] for each in of_parts]
        if all(isinstance(each, torch.Tensor) for each in (value, *pieces)) and value.shape == start.shape:
            if not same_bits(value, torch.cat([piece.reshape(-1) for piece in pieces])):
                return False
        elif not all(equal(value, piece) for piece in pieces):
            return False
    return True


def same_bits_for_strides(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> bool:
    """True if the class gives the same bits with a gradient whose strides are not those of its parameter."""
    shape = 61, 67
    alike, others = (Twin(optimizer, group, [seeded(shape, dtype, 0, device)]) for _ in range(2))
    for step in range(_STEPS):
        gradient = seeded(shape, dtype, step + 1, device)
        alike.step([gradient])
        others.step([gradient.t().contiguous().t()])
    return same_bits(alike.parameters[0].detach(), others.parameters[0].detach())


def refuse_unsupported(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for what cannot be stepped one parameter at a time: it names the class, and the reason."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{name} keeps one history across all parameters and cannot be swapped; use a per-parameter optimizer"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            f"{name}: differentiable=True keeps the graph of the step, which swapping would cut; set it to False"
        )
    own_step = vars(optimizer).get("step")  # A scheduler puts a wrapper there, which calls the class's.
    if own_step is not None and getattr(own_step, "__wrapped__", None) is not type(optimizer).step:
        raise ConfigError(
            f"{name}: step was replaced on the object by a {type(own_step).__name__}, which swapping would pass by; "
            "wrap the optimizer first and replace step then, or write a subclass with a step of its own"
        )
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise ConfigError(
            f"{name} wraps another optimizer, which does the work; wrap_optimizer the inner one, or, if {name} keeps "
            "entries of its own in the inner one's state, set offload_optimizer.device to none"
        )
    if stray := [key for key, value in optimizer.state.items() if value and not isinstance(key, torch.Tensor)]:
        raise ConfigError(
            f"{name} has state that belongs to no parameter of it ({stray[0]!r}), which cannot be swapped"
        )
    judge_closure_uses(optimizer)
    is_known = _is_one_of(optimizer, _elementwise | _whole)
    if is_known and package_of(optimizer) == "torch":
        return
    for group in optimizer.param_groups:
        shapes = {small_shape(p) for p in group["params"] if p.dim() <= len(PRIMES)}
        for shape in sorted(shapes, key=lambda s: (len(s), s))[:4]:
            if 0 not in shape:
                _refuse_coupling(optimizer, group, shape, is_known)


def _tried_together_and_apart(
    optimizer: Optimizer,
    group: dict[str, Any],
    start: Sequence[torch.Tensor],
    steps: int,
    size: float = 1.0,
    change: Callable[[torch.Tensor], object] = lambda first: None,
) -> tuple[Twin, Twin, StateBefore]:
    """Two twins over copies of `start`, one stepped at once, the other one parameter after the other.

    Args:
        size: of gradients.
        change: changes the gradients of the first, flat and in place.

    Returns:
        Both after the last step, and the state of the first when half of the steps were made.
    """
    together, apart = (Twin(optimizer, group, [t.clone() for t in start]) for _ in range(2))
    for step in range(steps):
        if step == steps // 2:
            state_before = StateBefore(together.optimizer)
        # Gradients that agree from step to step, and of two sizes, bring out what adapts to all of them together.
        gradients = [
            scale * size * (seeded(t.shape, t.dtype, seed) + 0.3 * seeded(t.shape, t.dtype, seed + step + 1))
            for t, scale, seed in zip(start, (1, 8), (1, 101), strict=True)
        ]
        change(gradients[0].view(-1))
        together.step(gradients)
        apart.step_apart(gradients)
    return together, apart, state_before


def _agree(together: Twin, apart: Twin) -> bool:
    same = equal(together.options, apart.options)
    for p, q in zip(together.parameters, apart.parameters, strict=True):
        same &= equal(together.optimizer.state[p], apart.optimizer.state[q]) and same_bits(p.detach(), q.detach())
    return same


def _agrees_when_late(optimizer: Optimizer, group: dict[str, Any], start: Sequence[torch.Tensor]) -> bool:
    """True if it does where a parameter has its first gradient later than another, so that their counts differ."""
    together, apart = (Twin(optimizer, group, [t.clone() for t in start]) for _ in range(2))
    for step in range(_STEPS):
        first, second = (seeded(t.shape, t.dtype, 10 * step + i) for i, t in enumerate(start))
        gradients = [first if step else None, second]
        try:
            together.step(gradients)
        except ConfigError:  # It takes no parameter without a gradient.
            return True
        apart.step_apart(gradients)
    return _agree(together, apart)


def _agrees_with(optimizer: Optimizer, group: dict[str, Any], start: Sequence[torch.Tensor], **gradients: Any) -> bool:
    """True if it does with such gradients: a class may look at all of them, say from some norm on."""
    try:
        together, apart, _ = _tried_together_and_apart(optimizer, group, start, _STEPS, **gradients)
    except ConfigError:  # It takes none of this kind.
        return True
    return _agree(together, apart)


def _refuse_coupling(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], is_known: bool) -> None:
    dtype = next(p.dtype for p in group["params"])
    # So small that an update of any usual size changes them, in bf16 too.
    start = [seeded(shape, dtype, seed) * 2.0**-12 for seed in (0, 100)]
    together, apart, state_before = _tried_together_and_apart(optimizer, group, start, _COUPLED_STEPS)
    found, others = (dict(own_numbers(twin.optimizer)) for twin in (together, apart))
    with torch.no_grad():  # Views of parameters that a step has made are among them.
        changed = [key for key in {**found, **others} if not equal(found.get(key), others.get(key))]
    if changed:
        short = len(changed[0]) < 60 and "\n" not in changed[0]
        where = changed[0] if short else changed[0].partition("[")[0]  # A key may be a tensor.
        raise ConfigError(
            f"{type(optimizer).__name__} changes its attribute {where} in a step, and would do so in that of each "
            "bucket; keep what it counts in param_groups or in the state of each parameter, remove what is for a log, "
            "or set offload_optimizer.device to none"
        )
    state_before.refuse_aliases(together)
    tell_of_result(optimizer, together.returned)
    if is_known and has_step_of_torch(optimizer) and equal(together.options, apart.options):
        return
    stray = [key for key in together.optimizer.state if not any(key is p for p in together.parameters)]
    if stray:
        raise ConfigError(
            f"{type(optimizer).__name__} keeps state that belongs to no parameter ({stray[0]!r}); it cannot be swapped"
        )
    untouched = not is_known and not any(together.optimizer.state.values())
    if untouched and all(same_bits(p.detach(), t) for p, t in zip(together.parameters, start, strict=True)):
        raise ConfigError(
            f"{type(optimizer).__name__} changed nothing in {_COUPLED_STEPS} trial steps on tensors of shape {shape}, "
            "so whether it can be swapped is unknown; if it wraps another optimizer, wrap_optimizer the inner one"
        )
    agrees = (
        _agree(together, apart)
        and all(_agrees_with(optimizer, group, start, size=size) for size in sizes_of(dtype))
        and all(_agrees_with(optimizer, group, start, change=change) for change in CHANGES.values())
    )
    if not agrees or not _agrees_when_late(optimizer, group, start):
        raise ConfigError(
            f"{type(optimizer).__name__} computes something else when it steps one parameter at a time, so it "
            "cannot be swapped exactly; set offload_optimizer.device to none, or use a per-parameter optimizer"
        )
