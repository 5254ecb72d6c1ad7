"""The same program run twice, plain and with its parameters on disk, and all that both must agree on to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from models import WIDTH
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

import swapper
from swapper.api import init, offload
from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.parameter import building
from swapper.parameter import records as parameter_records
from swapper.parameter.swapper import ParameterSwapper

__all__ = [
    "Run",
    "adamw",
    "bits",
    "close",
    "difference",
    "facts_of",
    "models_on",
    "offloaded",
    "run_twice",
    "small_records",
    "swapper_of",
]

BUCKET_BYTES = 16384
GROUP_BYTES = 8192
"""So short that a small model has many records."""

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def swapper_of(model: nn.Module) -> ParameterSwapper:
    """The swapper of an offloaded model."""
    return cast(ParameterSwapper, model.swapper)


def facts_of(model: nn.Module) -> list[tuple[object, ...]]:
    """What the parameters of `model` are, apart from their values; the objects themselves by their ids."""
    return [
        (
            *_own_facts(name, p),
            *(p.numel(), p.nbytes, p.ndim, p.size(), p.is_contiguous(), p.is_inference(), isinstance(p, nn.Parameter)),
        )
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def _own_facts(name: str, p: nn.Parameter) -> tuple[object, ...]:
    """Those that no others follow from."""
    return name, id(p), p.shape, p.dtype, p.device, p.layout, p.stride(), p.requires_grad, p.is_leaf


def bits(value: Any) -> Any:
    """`value` in a form whose `==` compares every bit of its tensors, and their dtypes, shapes and strides."""
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            keys, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            return [type(value).__name__, repr(context), {key: bits(getattr(value, key)) for key in keys}]
        if value.layout is not torch.strided:
            value = value.detach().coalesce()
            return "sparse", value.shape, bits(value.indices()), bits(value.values())
        data = value.detach().clone(memory_format=torch.contiguous_format).cpu().reshape(-1)
        return value.dtype, tuple(value.shape), value.stride(), data.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


_device: list[torch.device] = []
"""The accelerator that models and what they are called with are moved to, if there is one."""
_roomy: list[tuple[bool, str]] = [(False, "cpu")]
"""Whether parameters have more than the least of its memory, and where steps are."""


@contextmanager
def models_on(device: torch.device, *, roomy: bool = False, step_device: str = "cpu") -> Iterator[None]:
    """Within it `run_twice` moves models to an accelerator, and what they are called with.

    With `roomy` parameters have the memory there that is the default, else the least.
    """
    _device.append(device)
    _roomy.append((roomy, step_device))
    try:
        yield
    finally:
        _device.pop()
        _roomy.pop()


def _move(model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
    """What `make_optimizer` makes of `model`, both where `models_on` says."""
    if not _device:
        return model, make_optimizer(model)
    device = _device[-1]
    model = model.to(device)

    def move(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))

    model.register_forward_pre_hook(move, with_kwargs=True)
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        if "foreach" in group and _roomy[-1][1] == "cpu":
            group["foreach"] = False  # As it is on the CPU, where the twin is stepped.
    return model, optimizer


class Run:
    """One of the two runs, as a program sees it.

    Attributes:
        model, optimizer: plain or swapped.
        swapped: which.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, facts: list[tuple[object, ...]], swapped: bool) -> None:
        self.model = model
        self.optimizer = optimizer
        self.swapped = swapped
        self.log: list[tuple[str, Any]] = []
        self.facts = facts
        self.generator = torch.Generator().manual_seed(7)

    def note(self, label: str, value: Any) -> None:
        """Both runs must come here in the same order with the same bits."""
        self.log.append((label, bits(value)))

    def note_model(self, label: str) -> None:
        """Note parameters, gradients and buffers."""
        self.check_facts()
        for name, p in self.model.named_parameters(remove_duplicate=False):
            self.note(f"{label}: {name}", p)
            self.note(f"{label}: gradient of {name}", p.grad)
        for name, buffer in self.model.named_buffers():
            self.note(f"{label}: buffer {name}", buffer)

    def check_facts(self) -> None:
        """The parameters are the objects they were, and nothing but their values has changed."""
        assert facts_of(self.model) == self.facts

    def finish_step(self, label: str = "step") -> None:
        """Step after a backward, and note everything before and after it."""
        self.note_model(f"{label}, after backward")
        self.optimizer.step()
        self.note_model(f"{label}, after step")
        self.optimizer.zero_grad()


def _watch_facts(model: nn.Module) -> None:
    """Compare the facts in every forward and in every backward too, but for those that follow from others.

    Of all parameters, hundreds of times in one pass: what follows from others would take half of all time.
    """

    def facts() -> list[tuple[object, ...]]:
        return [_own_facts(name, p) for name, p in model.named_parameters(remove_duplicate=False)]

    first = facts()

    def check(*_: object) -> None:
        assert facts() == first

    def after(module: nn.Module, args: object, output: object) -> None:
        check()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(check)

    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(check)
            module.register_forward_hook(after)


@contextmanager
def small_records() -> Iterator[None]:
    """Within it records are short, and short parameters are not too short for `swapper.init`."""
    before = parameter_records.GROUP_BYTES, building.SMALL_BYTES
    parameter_records.GROUP_BYTES, building.SMALL_BYTES = GROUP_BYTES, 1
    try:
        yield
    finally:
        parameter_records.GROUP_BYTES, building.SMALL_BYTES = before


def offloaded(
    nvme_path: Path,
    make: Callable[[], tuple[nn.Module, Optimizer]],
    *,
    spare_bytes: int = 0,
    optimizer_device: str = "nvme",
    built_on_disk: bool = False,
) -> tuple[nn.Module, Optimizer]:
    """What `make` makes, swapped with the smallest pool that is accepted and `spare_bytes` more.

    With `built_on_disk` it is made within `swapper.init`.
    """
    pool_bytes = 3 * BUCKET_BYTES
    device_bytes = 1 if _device and not _roomy[-1][0] else None
    while True:
        config = _config(nvme_path, pool_bytes, optimizer_device, device_bytes)
        try:
            with small_records():
                with init(config) if built_on_disk else nullcontext():
                    model, optimizer = make()
                offload(model, optimizer, config)
        except ConfigError as error:
            if device_bytes and (found := re.search(r"device_bytes: .* set it to at least (\d+)", str(error))):
                assert device_bytes < int(found[1])
                device_bytes = int(found[1])
                continue
            found = re.search(r"[Ss]et pool_bytes to at least '?(\d+)", str(error))
            if found is None or int(found[1]) <= pool_bytes:
                raise
            pool_bytes = int(found[1])
            continue
        if spare_bytes == 0:
            return model, optimizer
        close(model, optimizer)
        pool_bytes, spare_bytes = pool_bytes + spare_bytes, 0


def _config(nvme_path: Path, pool_bytes: int, optimizer_device: str, device_bytes: int | None) -> OffloadConfig:
    return OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes=pool_bytes,
        bucket_bytes=BUCKET_BYTES,
        offload_optimizer={"device": optimizer_device, "step_device": _roomy[-1][1]},
        offload_param={"device": "nvme", "device_bytes": device_bytes},
    )


def close(model: nn.Module, optimizer: Optimizer) -> None:
    """End swapping; the values stay."""
    swapper_of(model).close(keep_values=True)
    state = getattr(optimizer, "swapper", None)
    if state is not None and hasattr(state, "close"):
        state.close()


def run_twice(
    nvme_path: Path,
    make_model: MakeModel,
    program: Callable[[Run], None],
    make_optimizer: MakeOptimizer = adamw,
    *,
    spare_bytes: int = 0,
    optimizer_device: str = "nvme",
    watch: bool = True,
    changes: bool = True,
    built_on_disk: bool = False,
) -> ParameterSwapper:
    """Run `program` plain and swapped and compare what it noted, the model at the end included.

    Args:
        nvme_path: for the records.
        make_model: called after seeding.
        program: gets the `Run`; random numbers are seeded before it.
        make_optimizer: of the model.
        spare_bytes: of pool, beyond the least.
        optimizer_device: where the optimizer's state is.
        watch: compare facts in every module's forward and backward.
        changes: whether the program must change parameters.
        built_on_disk: build the swapped model within `swapper.init`.

    Returns:
        The swapper, closed; its metrics say what was moved.
    """
    facts: list[tuple[object, ...]] = []

    def make() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = make_model()
        model, optimizer = _move(model, make_optimizer)
        facts[:] = facts_of(model)
        if watch:
            _watch_facts(model)
        return model, optimizer

    model, optimizer = make()
    first = {name: bits(p) for name, p in model.named_parameters()}
    plain = Run(model, optimizer, list(facts), swapped=False)
    _perform(plain, program)
    assert not changes or any(bits(p) != first[name] for name, p in model.named_parameters())

    model, optimizer = offloaded(
        nvme_path, make, spare_bytes=spare_bytes, optimizer_device=optimizer_device, built_on_disk=built_on_disk
    )
    swapper = swapper_of(model)
    swapped = Run(model, optimizer, list(facts), swapped=True)
    for name, p in model.named_parameters():
        assert bits(p) == first[name], f"{name} as it was taken over"
    reads = swapper.metrics.reads
    try:
        _perform(swapped, program)
        assert swapper.metrics.reads > reads or _device, (
            "nothing was swapped"
        )  # The pool may hold what a device does not.
    finally:
        close(model, optimizer)
    swapped.note_model("closed")
    plain.note_model("closed")
    for mine, theirs in zip(swapped.log, plain.log, strict=True):
        assert mine[0] == theirs[0]
        if mine[1] != theirs[1]:
            raise AssertionError(f"{mine[0]}: {difference(mine[1], theirs[1])}")
    return swapper


def difference(mine: Any, theirs: Any) -> str:
    """Says where two results of `bits` differ first."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            return f"keys {list(mine)} instead of {list(theirs)}"
        key = next(key for key in mine if mine[key] != theirs[key])
        return f"{key}: {difference(mine[key], theirs[key])}"
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        at = next(i for i, item in enumerate(mine) if item != theirs[i])
        return f"[{at}]: {difference(mine[at], theirs[at])}"
    if not isinstance(mine, tuple) or not isinstance(theirs, tuple) or len(mine) != 4 or len(theirs) != 4:
        return f"{str(mine)[:200]} instead of {str(theirs)[:200]}"
    if mine[:3] != theirs[:3]:
        return f"{mine[:3]} instead of {theirs[:3]}"
    dtype = mine[0]
    a, b = (torch.frombuffer(bytearray(bits), dtype=dtype) for bits in (mine[3], theirs[3]))
    return f"{int((a != b).sum())} of {a.numel()} elements differ, first {a[a != b][:3]} instead of {b[a != b][:3]}"


def _perform(run: Run, program: Callable[[Run], None]) -> None:
    torch.manual_seed(1)
    run.check_facts()
    program(run)
    run.note_model("end")


def config_for(nvme_path: Path, **settings: object) -> swapper.OffloadConfig:
    values: dict[str, object] = {
        "nvme_path": nvme_path, "pool_bytes": "2MiB", "bucket_bytes": "16KiB",
        "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"},
    }  # fmt: skip
    return swapper.OffloadConfig(**(values | settings))


def values_of(model: nn.Module) -> dict[str, object]:
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: bits(tensor) for name, tensor in tensors}


def on_meta(make: MakeModel) -> nn.Module:
    with torch.device("meta"):
        return make()


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(seed))


def evaluate(model: nn.Module) -> object:
    """Without hooks and gradients, where torch's layers take their fast path."""
    model.eval()
    with torch.no_grad():
        noted = [bits(model(inputs(seed))) for seed in (1, 2)]
    model.train()
    return noted


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> object:
    output = model(inputs(seed))
    output.square().mean().backward()
    gradients = [bits(p.grad) for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return bits(output), gradients, values_of(model)
