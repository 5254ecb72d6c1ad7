"""Random users' programs: what they are, how they run plain and swapped side by side, and how they are made small.

A program is data. It comes from a seed, prints as Python, and can be run again from either. Two twins perform its
actions in turn, one without swapper at all; what a user can see of them is compared to the bit after each action, as
far as the program looks: looking stages records, so that a program that always looks would never meet some states.

An action says what it works on by numbers that are taken modulo what there is. So any action can be left out of a
program and the rest still means something: that is what `minimised` lives from.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import functools
import io
import random
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import simulate, simulated
from interrupts import interrupted_at
from mock_cufile import COMPILER, built, open_patched
from models import CASES, VOCABULARY, WIDTH, Mlp, tokens, vectors
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from twins import bits, difference

import swapper
from swapper.checkpoint import state_writer
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.gradient import records as gradient_records
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.optimizer import encodings, records, segments
from swapper.optimizer.step_function import unhooked_step
from swapper.parameter import building
from swapper.parameter import records as parameter_records
from swapper.parameter.swapper import ParameterSwapper

__all__ = [
    "ACTIONS",
    "Action",
    "Difference",
    "Outcome",
    "Placement",
    "Program",
    "generate",
    "generate_on_device",
    "minimised",
    "perform",
]

LOW_PRECISION = (torch.bfloat16, torch.float16)
MASTER = "master_param"


# --- What a program is ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Action:
    """One thing that the user does.

    Attributes:
        name: of a method of `Twin`.
        numbers: its arguments; the first seeds torch's generator.
        look: what is compared afterwards, beside what the action returned: 1 parameters and buffers, 2 gradients too,
            3 the optimizers' state and options too.
    """

    name: str
    numbers: tuple[int, ...]
    look: int = 0


@dataclass(frozen=True)
class Placement:
    """What is kept where. The defaults are the simplest, which failing programs are brought to."""

    optimizer: str = "nvme"
    gradient: str = "none"
    parameter: str = "none"
    masters: bool = False
    in_backward: bool = False
    bucket_bytes: int = 1 << 20
    spare_bytes: int = 1 << 22
    resident_bytes: int = 0
    checked: bool = False
    drives: int = 1
    built_on_disk: bool = False
    """The model is made within `swapper.init`."""
    moves_all: bool = False
    """Small state and gradients move as well; else they stay in memory, where most of a small model's would."""
    packed: bool = False
    """State is packed on the drive; not where it is stepped on a device."""
    native: str = "off"
    step_device: str = "auto"
    device_spare_bytes: int = 1 << 22
    direct: bool = False
    """Between the drive and a device without the pool, by cuFile: see `mock_cufile`."""


@dataclass(frozen=True)
class Program:
    """A user's program. The defaults are the simplest."""

    model: str = "linear"
    dtype: str = "float32"
    optimizer: str = "adamw"
    optimizers: int = 1
    groups: int = 1
    left_out: int = 0
    """So many modules' parameters are in no group at the start."""
    passes: int = 1
    """Of backward, before each step."""
    threads: int = 1
    device: str = ""
    """How a simulated device behaves that the model is on: "lazy", "random" or "poison" (see `accelerators`)."""
    number: int = 0
    """Of the device; the current one is always the first."""
    writes_by_thread: bool = False
    """What was copied from the device is written without a call. Then no run is quite like another."""
    placement: Placement = Placement()
    actions: tuple[Action, ...] = ()

    def __str__(self) -> str:
        lines = [f"        {action!r}," for action in self.actions]
        placement = f"Placement({_changed(self.placement)})"
        options = _changed(self, "actions", "placement")
        return "\n".join([f"Program({options}", f"    placement={placement},", "    actions=(", *lines, "    ),", ")"])


def _changed(item: Any, *without: str) -> str:
    fields = [f for f in dataclasses.fields(item) if f.name not in without and getattr(item, f.name) != f.default]
    end = "," if without and fields else ""
    return ", ".join(f"{f.name}={getattr(item, f.name)!r}" for f in fields) + end


def _kind_of(error: BaseException) -> str:
    """Its class, and how its message begins, without what is different each time."""
    return f"{type(error).__name__}: {re.sub('[0-9]+', '', str(error))[:40]}"


class Difference(AssertionError):
    """The twins differ: `kind` says how in a word or two, for telling one defect from another."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Ended(Exception):
    """Both twins raised the same exception of torch's: the program ends here."""


class Refused(Exception):
    """The swapped twin refused an action, as documented: the program ends here."""


@dataclass
class Outcome:
    """What came of a program without a difference."""

    performed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    refused: str = ""


# --- Models -----------------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Layers(nn.Module):
    """Two layers that fit one bucket, or two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 67), nn.Linear(67, 31)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Wide(nn.Module):
    """A matrix that is cut into several segments, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 301)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.norm(x))


class Sparse(nn.Module):
    """Two tables of embeddings, one with sparse gradients and the other with a largest norm; and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.bounded = nn.Embedding(VOCABULARY, WIDTH, max_norm=3.0)
        self.head = nn.Linear(WIDTH, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.sparse(x) + self.bounded(x))


class Bounded(Sparse):
    """As `Sparse`, with dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse.sparse = False


class Checkpointed(nn.Module):
    """Activations are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp(1) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm(x)


OWN_MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "linear": (Linear, vectors),
    "layers": (Layers, vectors),
    "wide": (Wide, vectors),
    "bounded embeddings": (Bounded, tokens),
    "sparse embeddings": (Sparse, tokens),
    "checkpointed": (lambda: Checkpointed(False), vectors),
    "checkpointed, reentrant": (lambda: Checkpointed(True), vectors),
}
LEFT_OUT = {
    "dtypes": "warns of complex numbers",
    "llama bf16": "the dtype is chosen beside the model",
    "llama fp64": "the dtype is chosen beside the model",
    "normed weights, old": "warns that it is deprecated",
}
MODELS = {**OWN_MODELS, **{name: (case.make, case.inputs) for name, case in CASES.items() if name not in LEFT_OUT}}
ONE_DTYPE = ("cells", "codebook", "normed weights, new")
"""Made for float32 alone, or full of NaN in low precision."""
SLOW_IN_LOW_PRECISION = ("resnet", "resnet channels_last", "convolutions", "vit")
SIMPLER_MODELS = ("linear", "layers", "wide", "mlp")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float64", "float16")}


# --- Optimizers -------------------------------------------------------------------------------------------------------


class SignMomentum(Optimizer):
    """A user's own class: stepped on whole parameters."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["steps"] = 0
                state["momentum"].lerp_(p.grad, 1 - group["beta"])
                state["steps"] += 1
                p.add_(state["momentum"].sign(), alpha=-group["lr"])
        return loss


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov foreach": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True}),
    "sgd fused": (torch.optim.SGD, {"fused": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "adam maximize": (torch.optim.Adam, {"maximize": True, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adamw for loop": (torch.optim.AdamW, {"foreach": False}),
    "adamw tensor lr": (torch.optim.AdamW, {"foreach": False}),
    "adamw capturable": (torch.optim.AdamW, {"capturable": True}),
    "rmsprop capturable": (torch.optim.RMSprop, {"capturable": True, "foreach": True}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "adadelta": (torch.optim.Adadelta, {"foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {"t0": 1}),
    "adafactor": (torch.optim.Adafactor, {}),
    "muon": (torch.optim.AdamW, {}),  # And Muon for the matrices, if this torch has it.
    "sign momentum": (SignMomentum, {}),
}
ON_ANY_DEVICE = [name for name in OPTIMIZERS if "capturable" not in name]
FOR_SPARSE = ("sgd", "adagrad")
NOT_IN_LOW_PRECISION = ("sgd fused", "nesterov foreach")
"""Without masters. The first leaves such parameters as they are; in the second the first step of one parameter changes
the rounding of the others, which are stepped one by one then."""
LEARNING_RATE = 2.0**-7


def with_masters(cls: type[Optimizer]) -> type[Optimizer]:
    """`cls`, stepping fp32 copies of parameters in low precision: the reference for `master_weights: true`."""

    class Masters(cls):  # type: ignore[valid-type, misc]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            pairs = []
            for group in self.param_groups:
                for i, p in enumerate(group["params"]):
                    if p.dtype not in LOW_PRECISION or p.grad is None:
                        continue
                    state = self.state.pop(p, {})
                    shadow = nn.Parameter(master_of(p, state))
                    if state.pop(MASTER, None) is None:  # What the class made for `p` when it was constructed.
                        state = in_float(state)
                    shadow.grad = p.grad.float()
                    self.state[shadow] = state
                    group["params"][i] = shadow
                    pairs.append((group, i, p, shadow))
            unhooked_step(cls)(self)
            with torch.no_grad():
                for group, i, p, shadow in pairs:
                    group["params"][i] = p
                    p.copy_(shadow)
                    self.state[p] = {**self.state.pop(shadow), MASTER: shadow.detach()}
            return loss

    return Masters


def in_float(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.float() if isinstance(v, torch.Tensor) and v.dtype in LOW_PRECISION else v for k, v in state.items()}


def master_of(p: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The master in `state`, or a new one if there is none or the user has changed the parameter."""
    master = state.get(MASTER)
    if master is None or not torch.equal(master.to(p.dtype).view(torch.int16), p.detach().view(torch.int16)):
        return p.detach().float().clone()
    return master


def _matrices(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.ndim == 2]


# --- A twin -----------------------------------------------------------------------------------------------------------


class UserError(Exception):
    """What the programs' own hooks raise."""


@dataclass
class Saved:
    """A state of the training, as one twin keeps it."""

    signature: Any
    model: Any = None
    optimizers: Any = None
    directory: Path | None = None
    as_it_was: bool = False
    """A checkpoint brings back what was saved. torch's `load_state_dict` casts some of it to the parameter's dtype."""


class Skip(Exception):
    """There is nothing that the action could work on. Both twins come to that alike."""


class Twin:
    """One of the two runs. A method for each action; what it returns is compared.

    Attributes:
        swapped: whether it is the one that is swapped.
        faults: of its drives.
    """

    def __init__(self, program: Program, swapped: bool, path: Path, faults: FaultPlan) -> None:
        self.program, self.swapped, self.path = program, swapped, path
        self.placement = program.placement
        self.faults = faults
        self.dtype = DTYPES[program.dtype]
        self.device = f"sim:{program.number}" if program.device else "cpu"
        self.device_type = self.device.partition(":")[0]
        self.make, self.inputs = MODELS[program.model]
        self.saves: dict[int, Saved] = {}
        self.removed: list[tuple[Optimizer, int, nn.Parameter]] = []
        self.schedulers: list[Any] = []
        self.scaler: Any = None
        self.average: dict[str, torch.Tensor] = {}
        self.averaged: Any = None
        self.log: list[Any] = []
        self.handles: list[Any] = []
        self.adapters: list[nn.Parameter] = []
        self.lora = False
        self.kept: list[Any] = []
        self.side: Any = None
        self.other: tuple[nn.Module, Any] | None = None
        self.checkpoints = 0
        self.replaced = False
        self._begin()

    # --- Making and ending ---

    def _begin(self) -> None:
        """Make the model and its optimizers, and swap them."""
        if not self.swapped:
            self._build()
        elif self.placement.built_on_disk and self.placement.parameter == "nvme":
            self._offload(built_on_disk=True)
        else:
            self._build()
            self._offload()
        self.first_signature = self.signature()

    def _build(self, config: swapper.OffloadConfig | None = None) -> None:
        torch.default_generator.manual_seed(0)
        with contextlib.nullcontext() if config is None else swapper.init(config):
            self.model = self.make().to(device=self.device, dtype=self.dtype)
        self.held_out: list[nn.Parameter] = []
        self.optimizers = self._make_optimizers()

    def _make_optimizers(self) -> list[Optimizer]:
        program = self.program
        layers = [list(m.parameters(recurse=False)) for m in self.model.modules()]
        layers = [layer for layer in layers if layer]
        seen: set[int] = set()
        for layer in layers:  # Tied parameters are those of the first that has them.
            layer[:] = [p for p in layer if id(p) not in seen]
            seen.update(id(p) for p in layer)
        if program.left_out:
            for layer in layers[1 :: max(2, len(layers) // program.left_out)][: program.left_out]:
                self.held_out += layer
                layer.clear()
        parameters = [p for layer in layers for p in layer]
        cls, options = OPTIMIZERS[program.optimizer]
        kinds: list[tuple[type[Optimizer], dict[str, Any], list[nn.Parameter]]] = []
        if program.optimizer == "muon" and hasattr(torch.optim, "Muon") and _matrices(parameters):
            kinds.append((torch.optim.Muon, {}, _matrices(parameters)))
            parameters = [p for p in parameters if p.ndim != 2]
        share = max(1, -(-len(parameters) // program.optimizers))
        kinds += [(cls, options, parameters[i : i + share]) for i in range(0, len(parameters), share)]
        return [self._make_optimizer(*kind) for kind in kinds]

    def _make_optimizer(
        self, cls: type[Optimizer], options: dict[str, Any], parameters: list[nn.Parameter]
    ) -> Optimizer:
        if self.placement.masters and not self.swapped:
            cls = with_masters(cls)
        share = max(1, -(-len(parameters) // self.program.groups))
        rate = LEARNING_RATE
        groups = [{"params": parameters[i : i + share], "lr": rate / (1 + i)} for i in range(0, len(parameters), share)]
        place = self.placement
        one_by_one = place.step_device != "device" or (place.optimizer == "none" and place.parameter != "none")
        if self.program.device and one_by_one and "foreach" in signature(cls).parameters:
            options = {"foreach": options.get("fused", False) and None, **options}  # As it is on the CPU.
        if self.program.optimizer == "adamw tensor lr":
            options = {**options, "capturable": False}
            for group in groups:
                group["lr"] = torch.tensor(group["lr"])
        return cls(groups, lr=rate, **options)  # type: ignore[call-arg]

    def _offload(self, built_on_disk: bool = False) -> None:
        """With the smallest pool that is accepted, and `spare_bytes` more."""
        place = self.placement
        paths = [self.path / f"drive-{number}" for number in range(place.drives)]
        for path in paths:
            path.mkdir(exist_ok=True)
        pool_bytes = 3 * place.bucket_bytes + 2 * place.resident_bytes
        spare_bytes = place.spare_bytes
        on_device = bool(self.program.device) and place.parameter != "none"
        device_bytes = 4096 + place.resident_bytes
        device_spare_bytes = place.device_spare_bytes if on_device else 0
        while True:
            config = swapper.OffloadConfig(
                nvme_path=paths,
                pool_bytes=pool_bytes,
                bucket_bytes=place.bucket_bytes,
                verify="crc32c" if place.checked and not place.direct else "none",
                gradient_accumulation_steps=self.program.passes,
                offload_optimizer={
                    "device": place.optimizer,
                    "master_weights": place.masters,
                    "step_in_backward": place.in_backward,
                    "resident_bytes": place.resident_bytes if place.optimizer == "nvme" else 0,
                    "encoding": "packed" if place.packed and place.optimizer == "nvme" else "exact",
                    "native_step": place.native,
                    **({"step_device": place.step_device} if self.program.device else {}),
                },
                offload_gradient={"device": place.gradient},
                offload_param={
                    "device": place.parameter,
                    "resident_bytes": place.resident_bytes if place.parameter == "nvme" else 0,
                    "device_resident_bytes": place.resident_bytes if on_device else 0,
                    **({"device_bytes": device_bytes} if on_device else {}),
                },
            )
            try:
                if built_on_disk:
                    self._build(config)
                swapper.offload(self.model, self.optimizers, config)
            except ConfigError as error:
                found = re.search(r"[Ss]et pool_bytes to at least '?(\d+)", str(error))
                if found is None and (found := re.search(r"device_bytes: .* set it to at least (\d+)", str(error))):
                    device_bytes = max(int(found[1]), device_bytes + 4096)
                    continue
                if found is None:
                    raise
                # What one optimizer needs, beside which there may be others.
                pool_bytes = max(int(found[1]), pool_bytes + 4096)
                continue
            if not spare_bytes and not device_spare_bytes:
                return
            self._end()
            pool_bytes, spare_bytes, built_on_disk = pool_bytes + spare_bytes, 0, False
            device_bytes, device_spare_bytes = device_bytes + device_spare_bytes, 0

    @property
    def parameters_swapped(self) -> bool:
        return isinstance(vars(self.model).get("swapper"), ParameterSwapper)

    def _end(self) -> None:
        """Undo `_offload`: state and parameters come back."""
        for optimizer in self.optimizers:
            swapper.unwrap_optimizer(optimizer, drop_masters=self.placement.masters)
        if self.parameters_swapped:
            self.model.swapper.close(keep_values=True)
            vars(self.model).pop("swapper", None)

    def close(self) -> None:
        """After the last action."""
        self._close_other()
        for handle in self.handles:
            handle.remove()
        if self.swapped:
            if self.parameters_swapped:
                self.model.swapper.close(keep_values=True)
            for optimizer in self.optimizers:
                if hasattr(optimizer, "swapper"):
                    optimizer.swapper.close()

    # --- Looking ---

    def seen(self, look: int) -> Iterator[tuple[str, Any]]:
        """What a user can see, by name."""
        if look >= 1:
            for name, p in self.model.named_parameters(remove_duplicate=False):
                yield f"requires_grad of {name}", p.requires_grad
                yield f"parameter {name}", bits(p)
            for name, buffer in self.model.named_buffers():
                yield f"buffer {name}", bits(buffer)
        if look >= 2:
            for name, p in self.model.named_parameters(remove_duplicate=False):
                yield f"gradient of {name}", bits(p.grad)
        if look >= 3:
            names = {id(p): name for name, p in self.model.named_parameters()}
            for number, optimizer in enumerate(self.optimizers):
                for at, group in enumerate(optimizer.param_groups):
                    options = {key: bits(value) for key, value in group.items() if key != "params"}
                    yield f"options of group {at} of optimizer {number}", options
                    yield f"parameters of group {at}", [names.get(id(p), "replaced") for p in group["params"]]
                    for i, p in enumerate(group["params"]):
                        name = names.get(id(p), f"the replaced one at {i}")
                        yield f"state of {name} in optimizer {number}", bits(self.state_of(optimizer, p))

    def state_of(self, optimizer: Optimizer, p: nn.Parameter) -> dict[str, Any]:
        if self.swapped:
            return optimizer.swapper.state(p)
        state = dict(optimizer.state.get(p, {}))
        if MASTER in state:
            state[MASTER] = master_of(p, state).view(p.shape)
        elif self.placement.masters:  # Not stepped yet: what the class made for `p` when it was constructed.
            state = in_float(state)
        return state

    def signature(self) -> Any:
        """What a saved state must have in common with the model and optimizers that it is loaded into."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups = [[[names.get(id(p)) for p in g["params"]] for g in o.param_groups] for o in self.optimizers]
        tied = [names[id(p)] for _, p in self.model.named_parameters(remove_duplicate=False)]
        return list(self.model.state_dict()), tied, groups

    # --- What actions share ---

    def _loss(self) -> torch.Tensor:
        """Of a random batch; noted. Never multiplied by a number: to `step_in_backward` that is what a scaler does."""
        inputs = [x.to(self.device, self.dtype if x.is_floating_point() else None) for x in self._inputs()]
        with self._default_device():
            out = self.model(*inputs)
        out = out if out.dtype is torch.float64 else out.float()
        loss = out.square().mean()
        for adapter in self.adapters:
            loss = loss + adapter.float().square().mean().to(loss.dtype)
        self.log.append(bits(loss))
        return loss

    def _inputs(self) -> Sequence[torch.Tensor]:
        return self.inputs(torch.default_generator)

    def _default_device(self) -> contextlib.AbstractContextManager[object]:
        """Tensors that a model makes in its forward are where it is."""
        return torch.device(self.device) if self.program.device else contextlib.nullcontext()

    def _zero(self, how: int) -> None:
        if how % 3 == 2 and not self.placement.in_backward:
            self.model.zero_grad()
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=how % 3 == 0 or self.placement.in_backward)

    def _clip(self, how: int) -> Any:
        """1 and 2 by norm and by value, as torch does it; 3 and 4 by the swapper's own."""
        found = []
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if all(p.grad is None for p in parameters):
                continue  # torch's clipping by value fails then.
            ours = optimizer.swapper if self.swapped and how >= 3 else None
            if how in (1, 3):
                clip = ours.clip_grad_norm_ if ours else lambda norm, ps=parameters: nn.utils.clip_grad_norm_(ps, norm)
                found.append(bits(clip(0.25)))
            elif how in (2, 4):
                clip = (
                    ours.clip_grad_value_ if ours else lambda norm, ps=parameters: nn.utils.clip_grad_value_(ps, norm)
                )
                clip(2.0**-9)
        return found

    def _places(self, owned: bool = False) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Each floating-point parameter once, with the module and the name that it has there."""
        seen: set[int] = set()
        places = []
        grouped = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]} if owned else None
        for module in self.model.modules():
            for name, p in module._parameters.items():
                if p is None or id(p) in seen or not p.is_floating_point() or (owned and id(p) not in grouped):
                    continue
                seen.add(id(p))
                places.append((module, name, p))
        if not places:
            raise Skip
        return places

    def _at(self, number: int, owned: bool = False) -> tuple[nn.Module, str, nn.Parameter]:
        places = self._places(owned)
        return places[number % len(places)]

    def _whole_layer(self, number: int, owned: bool = False) -> list[nn.Parameter]:
        """One parameter, or, if `number` is odd, those of its module."""
        module, _, p = self._at(number // 2, owned)
        return [q for m, _, q in self._places(owned) if m is module] if number % 2 else [p]

    def _without_step(self) -> None:
        """With `step_in_backward` only whole windows make sense."""
        if self.placement.in_backward:
            raise Skip

    # --- Training ---

    def train(self, _: int, clip: int = 0, zero: int = 0, first: int = 0) -> Any:
        """A whole window: backward passes, perhaps clipping, a step."""
        found = None
        if first and not self.placement.in_backward:
            self._zero(zero)
        for _ in range(self.program.passes):
            (self._loss() / self.program.passes).backward()
        if clip and not self.placement.in_backward:
            found = self._clip(1 + clip % 4)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        if not first or self.placement.in_backward:
            self._zero(zero)
        return found

    def backward(self, _: int, forwards: int = 0) -> None:
        """One pass more, which may be of several forwards."""
        self._without_step()
        sum((self._loss() for _ in range(forwards % 3)), self._loss()).backward()

    def forward(self, _: int) -> None:
        """Whose loss nobody uses."""
        self._loss()

    def step(self, _: int, which: int = 0) -> None:
        self._without_step()
        self.optimizers[which % len(self.optimizers)].step()

    def zero(self, _: int, how: int = 0) -> None:
        self._without_step()
        self._zero(how)

    def clip(self, _: int, how: int = 0) -> Any:
        self._without_step()
        return self._clip(1 + how % 4)

    def closure(self, _: int, raises: int = 0) -> Any:
        """`step(closure)`, whose closure may raise."""
        self._without_step()

        def closure() -> torch.Tensor:
            self._zero(0)
            loss = self._loss()
            loss.backward()
            if raises % 4 == 1:
                raise UserError
            return loss

        return [bits(optimizer.step(closure)) for optimizer in self.optimizers]

    def scaled(self, _: int, infinite: int = 0, clip: int = 0) -> Any:
        """A step by `GradScaler`, which leaves it out if a gradient is infinite."""
        self._without_step()
        if self.dtype is torch.float16 or self.program.model.startswith("sparse"):
            raise Skip  # torch unscales no gradients of either.
        if self.scaler is None:
            self.scaler = torch.amp.GradScaler(self.device_type, init_scale=2.0**8, growth_interval=3)
        self._zero(0)
        self.scaler.scale(self._loss()).backward()
        if infinite % 2:
            *_, p = self._at(infinite // 2, owned=True)
            if p.grad is not None and p.numel():
                with torch.no_grad():
                    p.grad.view(-1)[0] = float("inf") if p.grad.is_contiguous() else 0.0
        found = None
        if clip % 2:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            found = self._clip(1)
        for optimizer in self.optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                self.scaler.step(optimizer)
        self.scaler.update()
        self._zero(0)
        return found, self.scaler.get_scale()

    def evaluate(self, _: int, how: int = 0) -> Any:
        self.model.eval()
        try:
            with (torch.no_grad, torch.inference_mode, torch.enable_grad)[how % 3]():
                return bits(self._loss())
        finally:
            self.model.train()

    def penalty(self, _: int, number: int = 0) -> Any:
        """The gradient of a norm, by `torch.autograd.grad`, which leaves `p.grad` alone."""
        *_, p = self._at(number)
        if not p.requires_grad:
            raise Skip
        return bits(torch.autograd.grad(self._loss(), p, allow_unused=True)[0])

    # --- Forward and backward in other ways ---

    def _need_device(self) -> Any:
        """The device's module."""
        if not self.program.device:
            raise Skip
        return torch.get_device_module(self.device)

    def on_stream(self, _: int, how: int = 0) -> Any:
        """A window, or an evaluation, on a stream of the user's, who has each stream wait for the other."""
        module = self._need_device()
        if self.side is None:
            self.side = module.Stream(self.device)
        first, side = module.current_stream(self.device), self.side
        if how % 4 == 1:
            self._zero(0)  # Their memory is the first stream's.
        side.wait_stream(first)
        found = None
        with module.stream(side):
            if how % 4 == 0:
                found = self.evaluate(0, how // 4)
            elif how % 4 == 1 or self.placement.in_backward:
                found = self.train(0, how // 4, 0)
            else:
                self._loss().backward()
        first.wait_stream(side)
        if how % 4 >= 2 and not self.placement.in_backward:
            if how % 4 == 3:
                found = self._clip(1 + how // 4 % 4)
            for optimizer in self.optimizers:
                optimizer.step()
            side.wait_stream(first)  # The memory of gradients is that stream's.
            self._zero(0)
        return found

    def copied_late(self, _: int, number: int = 0, how: int = 0) -> Any:
        """A copy that does not block: of values or a gradient to page-locked memory, or of values from there."""
        module = self._need_device()
        *_, p = self._at(number)
        source: torch.Tensor = p
        if how % 4 == 2 and p.grad is not None and not p.grad.is_sparse:
            source = p.grad
        there = torch.empty(p.shape, dtype=p.dtype, pin_memory=True)
        event = module.Event()
        with torch.no_grad():
            if how % 4 == 3:
                there.normal_()
                p.copy_(there, non_blocking=True)
            else:
                there.copy_(source.data if how % 4 else source, non_blocking=True)
        event.record(module.current_stream(self.device))
        event.synchronize()
        return bits(there)

    def cast(self, _: int, clip: int = 0) -> Any:
        """A window whose forward is within `torch.autocast`."""
        if self.program.dtype != "float32" or self.program.model in ONE_DTYPE:
            raise Skip
        for _ in range(self.program.passes):
            with torch.autocast(self.device_type, torch.bfloat16):
                loss = self._loss()
            (loss / self.program.passes).backward()
        found = self._clip(1 + clip % 4) if clip % 2 and not self.placement.in_backward else None
        for optimizer in self.optimizers:
            optimizer.step()
        self._zero(0)
        return found

    def recomputed(self, _: int, how: int = 0) -> None:
        """A window whose forward is computed again in backward."""
        model = self.model
        for _ in range(self.program.passes):
            inputs = [x.to(self.device, self.dtype if x.is_floating_point() else None) for x in self._inputs()]
            if how % 2 and not any(x.requires_grad for x in inputs) and inputs[0].is_floating_point():
                inputs[0].requires_grad_()
            with self._default_device():
                out = checkpoint(model, *inputs, use_reentrant=bool(how % 2))
            if not out.requires_grad:
                raise Skip
            self.log.append(bits(out))
            (out.float().square().mean() / self.program.passes).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self._zero(0)

    def twice(self, _: int, how: int = 0) -> None:
        """The gradient of a gradient's norm; or a graph that backward goes through twice."""
        self._without_step()
        if how % 2:
            loss = self._loss()
            loss.backward(retain_graph=True)
            loss.backward()
            return
        *_, p = self._at(how // 2)
        place = self.placement
        if not p.requires_grad or (
            place.parameter != "none" and min(place.spare_bytes, place.device_spare_bytes) < 1 << 22
        ):
            raise Skip  # The graph of a gradient keeps the values of all parameters that it is of.
        (gradient,) = torch.autograd.grad(self._loss(), p, allow_unused=True, create_graph=True)
        if gradient is None or not gradient.requires_grad or gradient.is_sparse:
            raise Skip
        gradient.float().square().sum().backward()

    def keep_gradients(self, _: int) -> Any:
        """Gradients that the user has yet when others have come."""
        found = bits(self.kept)
        self.kept = [p.grad for *_, p in self._places() if p.grad is not None]
        return found

    def copied_model(self, _: int, how: int = 0) -> Any:
        """A copy of the model by `copy.deepcopy` or pickle, evaluated."""
        if self.handles or self.lora:
            raise Skip  # Hooks would be copied, with the twin that they belong to.
        if how % 2:
            file = io.BytesIO()
            torch.save(self.model.state_dict(), file)
            file.seek(0)
            return bits(torch.load(file, map_location="cpu"))
        other, mine = copy.deepcopy(self.model), self.model
        self.model = other
        try:
            return self.evaluate(0, how // 2), bits(dict(other.named_parameters()))
        finally:
            self.model = mine

    def functional(self, _: int) -> Any:
        """`torch.func.functional_call` with other values."""
        values = {name: p.detach() * 0.5 for name, p in self.model.named_parameters() if p.is_floating_point()}
        inputs = [x.to(self.device, self.dtype if x.is_floating_point() else None) for x in self._inputs()]
        self.model.eval()
        try:
            with torch.no_grad(), self._default_device():
                return bits(torch.func.functional_call(self.model, values, tuple(inputs)))
        finally:
            self.model.train()

    def away(self, _: int, how: int = 0) -> Any:
        """The model is moved to the CPU, looked at, and moved back."""
        if not self.program.device or self.placement.in_backward:
            raise Skip
        self.model.to("cpu")
        found = bits(self.model.state_dict())
        self.model.to(self.device)
        return found

    def other_model(self, seed: int, how: int = 0) -> Any:
        """Another model beside this one, with a pool and records of its own."""
        if self.other is None:
            model = Layers().to(self.device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
            if self.swapped:
                path = self.path / "other"
                path.mkdir(exist_ok=True)
                config = swapper.OffloadConfig(
                    nvme_path=path,
                    pool_bytes=1 << 20,
                    bucket_bytes=16384,
                    offload_optimizer={"device": "nvme", "step_device": "device" if self.program.device else "auto"},
                    offload_param={"device": ("nvme", "none")[how % 2]},
                )
                swapper.offload(model, optimizer, config)
            self.other = model, optimizer
        model, optimizer = self.other
        loss = model(vectors(torch.default_generator)[0].to(self.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = bits(loss), bits(dict(model.named_parameters()))
        if how % 3 == 2:
            self._close_other()
        return found

    def _close_other(self) -> None:
        if self.other is None:
            return
        model, optimizer = self.other
        self.other = None
        if self.swapped:
            if (owner := vars(model).get("swapper")) is not None:
                owner.close(keep_values=False)
            optimizer.swapper.close()

    def add_lora(self, _: int, number: int = 0, how: int = 0) -> None:
        """Adapters of a linear layer, by a hook, in a group of their own; its own parameters may be frozen."""
        layers = [m for m in self.model.modules() if type(m) is nn.Linear and not hasattr(m, "lora_a")]
        if not layers:
            raise Skip
        layer = layers[number % len(layers)]
        make = {"device": self.device, "dtype": layer.weight.dtype}
        layer.lora_a = nn.Parameter((torch.randn(2, layer.in_features) * 0.1).to(**make))
        layer.lora_b = nn.Parameter((torch.randn(layer.out_features, 2) * 0.1).to(**make))
        if how % 2:
            for p in (layer.weight, layer.bias):
                if p is not None:
                    p.requires_grad_(False)
        layer.register_forward_hook(lambda m, x, out: out + x[0] @ m.lora_a.t() @ m.lora_b.t())
        self.optimizers[how % len(self.optimizers)].add_param_group({"params": [layer.lora_a, layer.lora_b]})
        self.lora = True

    # --- The set of parameters ---

    def remove(self, _: int, number: int = 0, how: int = 0) -> None:
        """Take a parameter, or a module's, out of its group."""
        wanted = {id(p) for p in self._whole_layer(number, owned=True)}
        for optimizer in self.optimizers:
            for at, group in enumerate(optimizer.param_groups):
                gone = [p for p in group["params"] if id(p) in wanted]
                kept = [p for p in group["params"] if id(p) not in wanted]
                self.removed += [(optimizer, at, p) for p in gone]
                if how % 2:
                    group["params"] = kept
                else:
                    group["params"][:] = kept

    def put_back(self, _: int, number: int = 0, how: int = 0) -> None:
        """To the group it was taken from, in front or at the end."""
        if not self.removed:
            raise Skip
        optimizer, at, p = self.removed.pop(number % len(self.removed))
        parameters = optimizer.param_groups[at % len(optimizer.param_groups)]["params"]
        parameters.insert(0 if how % 2 else len(parameters), p)

    def replace(self, _: int, number: int = 0, how: int = 0) -> None:
        """Another `nn.Parameter` in a module, and in the group of the one that was there, or in none."""
        module, name, old = self._at(number)
        with torch.no_grad():
            new = nn.Parameter(torch.randn(old.shape).to(old) * 0.1, requires_grad=old.requires_grad)
        setattr(module, name, new)
        self.replaced = True
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for i, p in enumerate(group["params"]):
                    if p is old and how % 3 == 0:
                        group["params"][i] = new
                    elif p is old and how % 3 == 1:
                        del group["params"][i]
                        break

    def freeze(self, _: int, number: int = 0) -> None:
        for p in self._whole_layer(number):
            p.requires_grad_(False)
        if not any(p.requires_grad for p in self.model.parameters()):
            self.unfreeze(0, number)

    def unfreeze(self, _: int, number: int = 0) -> None:
        for p in self._whole_layer(number):
            p.requires_grad_(True)

    def add_group(self, _: int, which: int = 0) -> None:
        """Of what is in no group; or, if nothing is, of a new parameter."""
        optimizer = self.optimizers[which % len(self.optimizers)]
        if self.held_out:
            new = [self.held_out.pop(0)]
        elif self.removed and which % 3 == 0:
            new = [self.removed.pop()[2]]
        else:
            new = [nn.Parameter((torch.randn(WIDTH, 17) * 0.1).to(self.device, self.dtype))]
            self.model.register_parameter(f"adapter{len(self.adapters)}", new[0])
            self.adapters += new
        group = {"params": new, "lr": LEARNING_RATE / 2}
        optimizer.add_param_group(group)

    def options(self, _: int, which: int = 0, how: int = 0) -> None:
        """Another learning rate, or weight decay."""
        optimizer = self.optimizers[which % len(self.optimizers)]
        group = optimizer.param_groups[which % len(optimizer.param_groups)]
        if how % 2 and "weight_decay" in group:
            group["weight_decay"] = 0.05
        elif isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5

    def schedule(self, _: int, how: int = 0) -> None:
        kinds: tuple[Callable[[Optimizer], Any], ...] = (
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3),
        )
        if len(self.schedulers) >= len(self.optimizers):
            raise Skip
        self.schedulers += [kinds[how % 3](optimizer) for optimizer in self.optimizers]

    # --- Edits ---

    def edit(self, _: int, number: int = 0, how: int = 0) -> None:
        """Change a parameter's values, in one of the ways that users know."""
        *_, p = self._at(number)
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: p.mul_(0.5),
            lambda: p.data.add_(0.125),
            lambda: p.clamp_(-0.0625, 0.0625),
            lambda: p.copy_(torch.randn(p.shape)),
            lambda: nn.init.normal_(p),
            lambda: setattr(p, "data", p.data * 0.5),
            lambda: p.data.copy_(p.detach() + 0.125),
            lambda: p.detach().mul_(0.5),
            lambda: p.view(-1)[: p.numel() // 2].zero_() if p.is_contiguous() else p.zero_(),
        )
        with torch.no_grad():
            kinds[how % len(kinds)]()

    def edit_gradient(self, _: int, number: int = 0, how: int = 0) -> None:
        self._without_step()
        *_, p = self._at(number)
        if p.grad is None or p.grad.is_sparse:
            raise Skip
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: p.grad.mul_(0.5),
            lambda: setattr(p, "grad", None),
            lambda: setattr(p, "grad", p.grad * 2),
            lambda: setattr(p, "grad", torch.empty_like(p).copy_(p.grad)),
            lambda: p.grad.data.add_(0.125),
            lambda: p.grad.zero_(),
            lambda: setattr(p.grad, "data", p.grad.data * 0.5),
            lambda: p.grad.clamp_(-0.001, 0.001),
        )
        with torch.no_grad():
            kinds[how % len(kinds)]()

    def gathered(self, _: int, number: int = 0, how: int = 0) -> Any:
        """Within `swapper.gathered` parameters are plain ones."""
        *_, p = self._at(number)
        with swapper.gathered(p) if self.swapped else contextlib.nullcontext(), torch.no_grad():
            if how % 2:
                p.data.mul_(0.5)
            return bits(p.data.clone())

    def ema(self, _: int, how: int = 0) -> Any:
        """A moving average by hand: updated, or swapped in for an evaluation and out again."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name not in self.average or self.average[name].shape != p.shape:
                    self.average[name] = p.detach().clone()
                elif p.is_floating_point():
                    self.average[name].lerp_(p, 0.25)
        if how % 2 == 0:
            return bits(self.average)
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.data.copy_(self.average[name]) if how % 4 == 1 else p.copy_(self.average[name])
        found = self.evaluate(0)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.data.copy_(kept[name]) if how % 4 == 1 else p.copy_(kept[name])
        return found

    def averaged_model(self, _: int) -> Any:
        """torch's own moving average, of a copy of the model."""
        if self.averaged is None or len(list(self.averaged.parameters())) != len(list(self.model.parameters())):
            if self.handles:
                raise Skip  # Hooks would be copied, with the twin that they belong to.
            self.averaged = torch.optim.swa_utils.AveragedModel(self.model)
        if self.placement.parameter == "none":
            self.averaged.update_parameters(self.model)
        else:  # All at once, as torch does it, need not have room.
            with torch.no_grad():
                for mine, p in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
                    mine.lerp_(p, 0.25)
        return bits(dict(self.averaged.named_parameters()))

    def copied(self, _: int) -> None:
        """An optimizer that is swapped cannot be copied."""
        placement = self.placement
        if self.swapped and (placement.optimizer != "none" or placement.masters or placement.in_backward):
            self._refuses(lambda: copy.deepcopy(self.optimizers[0]))

    def _refuses(self, function: Callable[[], object]) -> None:
        try:
            function()
        except SwapError:
            return
        raise Difference("not refused", "a copy was not refused")

    def read(self, _: int, number: int = 0) -> Any:
        """Values and state of one parameter, in ways that users read them."""
        *_, p = self._at(number)
        found = [bits(p.detach().clone()), bits(p.sum()), bits(self.model.state_dict()), p.grad is None]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(p is q for q in group["params"]):
                    found.append(bits(self.state_of(optimizer, p)))
        return found

    # --- Hooks ---

    def hook(self, _: int, number: int = 0, kind: int = 0) -> None:
        """One that notes what passes, or changes it."""
        module, _, p = self._at(number)
        if kind % 7 in (3, 4) and not p.requires_grad:
            raise Skip
        if kind % 7 in (4, 5) and self.placement.in_backward:
            raise Skip
        optimizer = self.optimizers[number % len(self.optimizers)]

        def note(*values: Any) -> None:
            for value in values:
                self.log.append(bits(value) if isinstance(value, (torch.Tensor, tuple)) else None)

        def on_gradient(q: torch.Tensor) -> None:
            q.grad.mul_(0.5)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for q in group["params"]:
                    if q.grad is not None and not q.grad.is_sparse:
                        q.grad.mul_(0.5)

        self.handles.append(
            (
                lambda: module.register_forward_hook(lambda m, i, o: note(o)),
                lambda: module.register_forward_pre_hook(lambda m, i: note(m.training)),
                lambda: module.register_full_backward_hook(lambda m, i, o: note(o)),
                lambda: p.register_hook(lambda g: g * 0.5),
                lambda: p.register_post_accumulate_grad_hook(on_gradient),
                lambda: optimizer.register_step_pre_hook(before_step),
                lambda: optimizer.register_step_post_hook(lambda o, *_: note(len(o.param_groups))),
            )[kind % 7]()
        )

    def unhook(self, _: int, which: int = 0) -> None:
        if not self.handles:
            raise Skip
        self.handles.pop(which % len(self.handles)).remove()

    # --- What goes wrong ---

    def fail(self, _: int, number: int = 0, where: int = 0) -> None:
        """A training step that raises in a hook of the user's, and what a user does then: start the step again.

        With `step_in_backward` it may have stepped some parameters already, so the last state is loaded.
        """
        module, _, p = self._at(number)
        if self.placement.in_backward:
            self.save(0, 99, 0)

        def fail(*_: Any) -> None:
            raise UserError

        kind = where % 4
        if kind in (1, 3) and not p.requires_grad:
            raise Skip
        handle = (
            lambda: module.register_forward_pre_hook(fail),
            lambda: p.register_hook(fail),
            lambda: module.register_forward_hook(fail),
            lambda: p.register_post_accumulate_grad_hook(fail),
        )[kind]()
        raised = False
        try:
            self.train(0)
        except UserError:
            raised = True
        finally:
            handle.remove()
        self.log.append(raised)
        if self.placement.in_backward:
            self.load(0, 99)
        if where % 8 < 4 or self.placement.in_backward:
            self._zero(0)
            self.model.zero_grad()

    def interrupt(self, seed: int, place: int = 0, file: int = 0, what: int = 0) -> None:
        """Ctrl-C somewhere in the swapped twin. Both go on from what was saved before."""

        def strike(action: Callable[[], object]) -> None:
            interrupted_at(place, action, FILES[file % len(FILES)])
            if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                raise Difference("grad mode", "Ctrl-C left grad mode, or inference mode, as it was within")

        self._cut_off(seed, what, strike)

    def breaks(self, seed: int, at: int = 0, kind: int = 0, what: int = 0) -> None:
        """A transfer of the swapped twin fails, or memory of its device is refused. Both go on from what was saved."""
        kinds = ("read", "write", "full", *(("memory",) if self.program.device else ()))
        chosen = kinds[kind % len(kinds)]
        number = errno.ENOSPC if chosen == "full" else errno.EIO

        def arm(at: int) -> None:
            if chosen == "memory":
                simulated().refuse_at(at)
            else:
                self.faults.fail_errno = number
                setattr(self.faults, "fail_read_at" if chosen == "read" else "fail_write_at", at)

        def strike(action: Callable[[], object]) -> None:
            arm(at)
            try:
                action()
                for each in (self.model, *self.optimizers):
                    if hasattr(each, "swapper"):
                        each.swapper.flush()
            except (SwapIOError, RuntimeError) as error:
                if not isinstance(error, SwapIOError) and "out of memory" not in str(error):
                    raise  # Else it is one of torch: `load_state_dict` keeps the text of what it met.
                told = number if isinstance(error, SwapIOError) else None
                if (told is None) != (chosen == "memory") or (told is not None and error.errno != number):
                    raise Difference("another error", f"of {chosen}: {error!r}") from error
            finally:
                arm(0)

        self._cut_off(seed, what, strike)

    def _cut_off(self, seed: int, what: int, strike: Callable[[Callable[[], object]], None]) -> None:
        """Let `strike` call something in the swapped twin. Both go on from what was saved before."""
        self.save(0, 98, what // 4)
        logged, rates = len(self.log), [s.state_dict() for s in self.schedulers]
        before = copy.deepcopy(rates)
        if self.swapped:
            torch.default_generator.manual_seed(seed)
            action = (lambda: self.train(0), lambda: self.train(0), lambda: self.load(0, 98), lambda: self.read(0))
            strike(action[what % 4])
        del self.log[logged:]
        self.load(0, 98)
        for scheduler, state in zip(self.schedulers, before, strict=True):
            scheduler.load_state_dict(state)
        self._zero(0)
        self.model.zero_grad()  # And of what no optimizer has.

    # --- Saving, loading, wrapping ---

    def save(self, _: int, slot: int = 0, how: int = 0) -> None:
        """Keep the state: 0 in memory, 1 by `torch.save`, 2 as a checkpoint, which a plain program then loads."""
        if self.placement.in_backward and any(p.grad is not None for p in self.model.parameters()):
            raise Skip
        saved = Saved(self.signature())
        kind = how % 3
        saved.as_it_was = kind == 2
        if not self.swapped:
            saved.model = {key: value.detach().clone() for key, value in self.model.state_dict().items()}
            saved.optimizers = [self._state_dict(optimizer) for optimizer in self.optimizers]
        elif kind == 2:
            saved.directory = self.path / f"checkpoint-{self.checkpoints}"
            self.checkpoints += 1
            swapper.save_checkpoint(saved.directory, self.model, self.optimizers).wait()
        else:
            saved.model = {key: value.detach().clone() for key, value in self.model.state_dict().items()}
            saved.optimizers = [self._state_dict(optimizer) for optimizer in self.optimizers]
            if kind == 1:
                file = io.BytesIO()
                torch.save((self.model.state_dict(), saved.optimizers), file)
                file.seek(0)
                saved.model, saved.optimizers = torch.load(file)
        self.saves[slot] = saved

    def _state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """A copy. torch's own fails where there is state of a parameter that was taken out of the groups."""
        grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        away = {p: state for p, state in optimizer.state.items() if id(p) not in grouped}
        for p in away:
            del optimizer.state[p]
        try:
            return copy.deepcopy(optimizer.state_dict())
        finally:
            optimizer.state.update(away)

    def load(self, _: int, slot: int = 0, how: int = 0) -> None:
        if not self.saves:
            raise Skip
        saved = self.saves[slot] if slot in self.saves else list(self.saves.values())[slot % len(self.saves)]
        if saved.signature != self.signature():
            raise Skip
        if saved.directory is not None:
            swapper.load_checkpoint(saved.directory, self.model, self.optimizers)
            return
        if how % 2:
            self._load_optimizers(saved)
        self.model.load_state_dict(saved.model)
        if not how % 2:
            self._load_optimizers(saved)

    def _load_optimizers(self, saved: Saved) -> None:
        for optimizer, state in zip(self.optimizers, saved.optimizers, strict=True):
            state = copy.deepcopy(state)
            if self.swapped or not (self.placement.masters or saved.as_it_was):
                optimizer.load_state_dict(state)
                continue
            # torch would cast the moments of masters too, which do not have the parameters' dtype.
            optimizer.load_state_dict({**state, "state": {}})
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [i for group in state["param_groups"] for i in group["params"]]
            for number, p in zip(numbers, parameters, strict=True):
                if number in state["state"]:
                    optimizer.state[p] = state["state"][number]

    def exported(self, _: int) -> None:
        """A checkpoint of the swapped twin loads into plain PyTorch: a copy of the model as it was made."""
        if self.placement.masters or self.adapters or self.replaced or self.program.optimizer == "muon":
            raise Skip
        if not self.swapped:
            return
        directory = self.path / "exported"
        swapper.save_checkpoint(directory, self.model, self.optimizers).wait()
        placement = dataclasses.replace(self.placement)
        plain = Twin(dataclasses.replace(self.program, placement=placement), False, self.path, self.faults)
        names = dict(self.model.named_parameters())
        theirs = {id(p): name for name, p in names.items()}
        own = dict(plain.model.named_parameters())
        if set(names) != set(own):
            return
        for mine, optimizer in zip(plain.optimizers, self.optimizers, strict=True):
            if any(id(p) not in theirs for group in optimizer.param_groups for p in group["params"]):
                return
            mine.param_groups[:] = [
                {**group, "params": [own[theirs[id(p)]] for p in group["params"]]} for group in optimizer.param_groups
            ]
        swapper.load_checkpoint(directory, plain.model, plain.optimizers)
        for (name, mine), (_, yours) in zip(self.seen(1), plain.seen(1), strict=True):
            if "requires_grad" not in name and mine != yours:
                raise Difference("exported", f"{name} of the exported checkpoint: {difference(yours, mine)}")
        for optimizer, copied in zip(self.optimizers, plain.optimizers, strict=True):
            for group, copies in zip(optimizer.param_groups, copied.param_groups, strict=True):
                for p, q in zip(group["params"], copies["params"], strict=True):
                    here, there = bits(optimizer.swapper.state(p)), bits(dict(copied.state.get(q, {})))
                    if here != there:
                        raise Difference("exported", f"state of {theirs[id(p)]}: {difference(there, here)}")

    def rewrap(self, _: int) -> None:
        """Unwrap everything and swap it again."""
        if self.placement.masters:
            raise Skip  # They would be lost, as the documentation says.
        if self.swapped:
            self._end()
            self._offload()

    def restart(self, _: int, how: int = 0) -> None:
        """Save, end, and go on in what would be another process: with a new model and new optimizers."""
        if self.signature() != self.first_signature:
            raise Skip
        for p in self.model.parameters():
            p.grad = None
        self.save(0, 97, how)
        self.close()
        self.handles, self.schedulers, self.removed = [], [], []
        self.scaler = self.averaged = None
        self._begin()
        self.load(0, 97, how // 3)

    def threads(self, _: int, number: int = 0) -> None:
        torch.set_num_threads(1 + number % 2)

    def reset(self, _: int) -> None:
        """Start without state."""
        for optimizer in self.optimizers:
            if self.swapped:
                optimizer.swapper.reset()
            else:
                optimizer.state.clear()


FILES = (
    *(
        "optimizer/swapper.py",
        "optimizer/stepper.py",
        "storage/cache.py",
        "gradient/swapper.py",
        "gradient/evicted.py",
        "parameter/swapper.py",
        "parameter/owner.py",
        "parameter/cache.py",
    ),
    *(
        "optimizer/backward_step.py",
        "parameter/forward_hooks.py",
        "parameter/saved_tensors.py",
        "tensors/evicted.py",
        "tensors/evicted_views.py",
        "tensors/evicted_gradients.py",
        "tensors/homes.py",
        "storage/store.py",
        "optimizer/segments.py",
    ),
    *(
        "optimizer/state_dicts.py",
        "optimizer/records.py",
        "optimizer/operands.py",
        "optimizer/plan.py",
        "optimizer/plan_follower.py",
        "optimizer/conversion.py",
        "optimizer/failure.py",
        "checkpoint/saved_model.py",
        "checkpoint/state_loader.py",
        "checkpoint/checkpoint.py",
        "storage/buffers.py",
    ),
)
"""Of the package, where Ctrl-C may strike."""


# --- Running ----------------------------------------------------------------------------------------------------------

REFUSALS = (
    r"pool_bytes: .* too small",
    r"are left for (gradients|parameters), and",
    r"a sparse gradient came for a parameter that is cut into segments, and step_in_backward",
    r"leaves torch\.(bfloat16|float16) parameters on the CPU unchanged",
    r"Assign gradients in the parameter's layout",
    r"step_in_backward: true cannot be combined with (tensors in the same memory|views of one tensor)",
    r"foreach=True(, as None is on an accelerator)?: .* are in the same memory",
    r"a sparse gradient came, which can be stepped only on the CPU",
    r"convert, resize or move the model before swapper\.offload",
)
"""What the swapped twin may refuse, as the documentation says. The program then ends, and is counted as refused."""


@contextlib.contextmanager
def limits(moves_all: bool) -> Iterator[None]:
    """Records of parameters are short; and if `moves_all`, small state and gradients move as well."""
    changed: list[tuple[Any, str, int]] = [(parameter_records, "GROUP_BYTES", 8192), (building, "SMALL_BYTES", 1)]
    if moves_all:
        changed += [(m, "SMALL_BYTES", 256) for m in (encodings, segments, records, gradient_records, state_writer)]
    before = [getattr(module, name) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changed, before, strict=True):
            setattr(module, name, value)


@contextlib.contextmanager
def on_device(program: Program) -> Iterator[None]:
    """Afterwards nothing may have gone wrong that the simulated device sees."""
    if not program.device:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        sim_device = simulate(f"sim-{program.device}", patch, threads=program.writes_by_thread)
        sim_device.violations()  # Of a program that failed.
        if program.placement.direct and COMPILER:
            open_patched(built(), patch)
        yield
        if found := sim_device.violations():
            raise Difference("violations", "\n".join(found))


@contextlib.contextmanager
def failing_drive(wanted: bool) -> Iterator[FaultPlan]:
    """What fails on purpose on the drives of the swapped twin; without `wanted` they are as ever."""
    faults = FaultPlan()
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=faults))
        yield faults


def perform(program: Program, path: Path) -> Outcome:
    """Run both twins.

    Args:
        path: an empty directory, which is empty afterwards.

    Raises:
        Difference: they differ.
    """
    outcome = Outcome()
    twins: list[Twin] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(program.threads)
    try:
        # torch wants to be told, where a sparse tensor is made, and says so once in a process.
        with (
            on_device(program),
            failing_drive(any(action.name == "breaks" for action in program.actions)) as faults,
            limits(program.placement.moves_all),
            torch.sparse.check_sparse_tensor_invariants(enable=False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", UserWarning)  # torch's, of hooks and schedulers that users would hear.
            plain = Twin(program, False, path, faults)
            try:
                swapped = Twin(program, True, path, faults)
            except SwapError as error:
                _check_refusal(error, "being offloaded")
                outcome.refused = f"offload: {error}"
                return outcome
            twins = [swapped, plain]
            for number, action in enumerate(program.actions):
                where = f"action {number + 1}, {action.name}"
                try:
                    _act(action, swapped, plain, where, outcome)
                    _look(swapped, plain, action.look, where)
                except Refused as refused:
                    outcome.refused = f"{action.name}: {refused}"
                    return outcome
                except Ended:
                    return outcome
            _look(swapped, plain, 3, "the end")
            swapped.close()
            _look(swapped, plain, 1, "closed")
            twins = []
    finally:
        try:
            for twin in twins:
                with contextlib.suppress(Exception):  # Another exception is on its way, or it was refused.
                    twin.close()
        finally:
            torch.set_num_threads(threads)
            for left in path.iterdir():
                shutil.rmtree(left)
    return outcome


def _act(action: Action, swapped: Twin, plain: Twin, where: str, outcome: Outcome) -> None:
    mine, theirs = _performed(swapped, action), _performed(plain, action)
    if isinstance(mine, Difference):
        raise Difference(mine.kind, f"{where}: {mine}") from None
    if isinstance(mine, Skip) or isinstance(theirs, Skip):
        if type(mine) is not type(theirs):
            raise Difference("skips", f"{where}: {mine!r} instead of {theirs!r}")
        outcome.skipped.append(action.name)
        return
    if isinstance(mine, SwapError):
        _check_refusal(mine, where)
        raise Refused(str(mine))
    if isinstance(mine, BaseException) or isinstance(theirs, BaseException):
        if type(mine) is not type(theirs):
            error = mine if isinstance(mine, BaseException) else theirs
            assert isinstance(error, BaseException)
            which = "swapped" if error is mine else "plain"
            text = f"{where}: {which} raised {error!r}, the other one {'nothing' if error is mine else repr(mine)}"
            raise Difference(f"{which} raised {_kind_of(error)}", text) from error
        outcome.raised.append(f"{action.name}: {mine!r}")
        if not isinstance(mine, UserError):
            raise Ended  # In the middle of a step, perhaps: of that plain PyTorch takes no notice, and swapper does.
    else:
        outcome.performed.append(action.name)
        if mine != theirs:
            raise Difference("result", f"{where}: {difference(mine, theirs)}")
    if swapped.log != plain.log:
        raise Difference("loss", f"{where}: losses, or what hooks saw, differ: {difference(swapped.log, plain.log)}")
    swapped.log.clear()
    plain.log.clear()


def _performed(twin: Twin, action: Action) -> Any:
    """What the action returns, or the exception."""
    torch.default_generator.manual_seed(action.numbers[0])
    if twin.program.device:
        torch.get_device_module(twin.device).manual_seed_all(action.numbers[0])
    try:
        return getattr(twin, action.name)(*action.numbers)
    except Exception as error:
        return error


def _check_refusal(error: SwapError, where: str) -> None:
    if not any(re.search(pattern, str(error)) for pattern in REFUSALS):
        raise Difference(f"swapped raised {_kind_of(error)}", f"{where}: swapped raised {error!r}") from error


def _look(swapped: Twin, plain: Twin, look: int, where: str) -> None:
    try:
        for (name, mine), (other, theirs) in zip(swapped.seen(look), plain.seen(look), strict=True):
            assert name == other, (name, other)
            if mine != theirs:
                raise Difference(name.split()[0], f"{where}: {name}: {difference(mine, theirs)}")
    except Difference:
        raise
    except Exception as error:
        raise Difference(f"looking raised {_kind_of(error)}", f"{where}: looking raised {error!r}") from error


# --- Making programs --------------------------------------------------------------------------------------------------

ACTIONS: dict[str, tuple[int, int]] = {
    # How often, beside the others, and how many numbers it takes.
    "train": (30, 4),
    "backward": (6, 2),
    "forward": (2, 1),
    "step": (5, 2),
    "zero": (4, 2),
    "clip": (3, 2),
    "closure": (3, 2),
    "scaled": (4, 3),
    "evaluate": (4, 2),
    "penalty": (2, 2),
    "on_stream": (4, 2),
    "copied_late": (3, 3),
    "cast": (2, 2),
    "recomputed": (3, 2),
    "twice": (2, 2),
    "keep_gradients": (2, 1),
    "copied_model": (2, 2),
    "functional": (1, 1),
    "away": (2, 2),
    "other_model": (2, 2),
    "add_lora": (2, 3),
    "remove": (7, 3),
    "put_back": (8, 3),
    "replace": (5, 3),
    "freeze": (5, 2),
    "unfreeze": (5, 2),
    "add_group": (5, 2),
    "options": (3, 3),
    "schedule": (2, 2),
    "edit": (6, 3),
    "edit_gradient": (4, 3),
    "gathered": (3, 3),
    "ema": (3, 2),
    "averaged_model": (2, 1),
    "copied": (1, 1),
    "read": (3, 2),
    "hook": (6, 3),
    "unhook": (3, 2),
    "fail": (4, 3),
    "interrupt": (3, 4),
    "breaks": (3, 4),
    "save": (8, 3),
    "load": (8, 3),
    "exported": (2, 1),
    "rewrap": (4, 1),
    "restart": (4, 2),
    "threads": (2, 2),
    "reset": (1, 1),
}


NEEDS = {
    "put_back": ("remove",),
    "load": ("save", "interrupt", "breaks"),
    "unhook": ("hook",),
    "unfreeze": ("freeze",),
    "edit_gradient": ("backward",),
}
"""Actions that have nothing to work on, as a rule, before one of others."""

HABITS: tuple[tuple[str, ...], ...] = (
    ("remove", "train", "put_back", "train"),
    ("remove", "train", "save", "train", "load"),
    ("remove", "save", "put_back", "train"),
    ("replace", "train", "save", "train", "load"),
    ("freeze", "train", "rewrap", "unfreeze", "train"),
    ("freeze", "remove", "train", "unfreeze", "put_back", "train"),
    ("save", "train", "load", "train"),
    ("save", "add_group", "train"),
    ("add_group", "train", "save", "train", "load"),
    ("backward", "remove", "step", "put_back", "zero"),
    ("backward", "edit_gradient", "step", "zero"),
    ("backward", "backward", "clip", "step", "zero"),
    ("train", "rewrap", "train", "rewrap"),
    ("ema", "train", "ema"),
    ("interrupt", "train", "interrupt", "train"),
    ("breaks", "train", "breaks", "train"),
    ("fail", "train", "save", "train", "load"),
    ("hook", "train", "unhook", "train"),
    ("schedule", "train", "rewrap", "train"),
    ("reset", "train", "save", "reset", "load"),
    ("train", "restart", "train", "restart"),
    ("freeze", "train", "restart", "train"),
)


def generate_on_device(seed: int, without: Sequence[str] = ()) -> Program:
    """The program of a seed, with its model on a device."""
    program, rng = generate(seed, without), random.Random(seed)
    place = program.placement
    optimizer = program.optimizer
    step_device = rng.choice(("auto", "cpu", "device", "device"))
    if optimizer == "momentum" and program.dtype in ("bfloat16", "float16") and not place.masters:
        optimizer = "adamw"  # As `NOT_IN_LOW_PRECISION` says: there foreach is the default.
    if optimizer in ("adamw", "rmsprop") and step_device == "device" and rng.random() < 0.2:
        optimizer = f"{optimizer} capturable"
    return dataclasses.replace(
        program,
        optimizer=optimizer,
        device=rng.choice(("lazy", "random", "poison")),
        number=int(rng.random() < 0.3),
        writes_by_thread=rng.random() < 0.2,
        placement=dataclasses.replace(
            place,
            gradient="cpu" if place.gradient == "nvme" and rng.random() < 0.3 else place.gradient,
            parameter="cpu" if place.parameter == "nvme" and rng.random() < 0.3 else place.parameter,
            packed=False,
            step_device=step_device,
            # torch's own step may ask for all parameters at once.
            device_spare_bytes=1 << 22 if place.optimizer == "none" else rng.choice((0, 8192, 1 << 22)),
            direct=rng.random() < 0.4,
        ),
    )


def generate(seed: int, without: Sequence[str] = ()) -> Program:
    """The program of a seed.

    Args:
        without: actions to leave out, and "masters", "in_backward", names of models, dtypes or optimizers.
    """
    rng = random.Random(seed)
    left_out = set(without)

    def choose(items: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        while True:
            (item,) = rng.choices(items, weights)
            if not isinstance(item, str) or item not in left_out:
                return item

    model = choose([*OWN_MODELS, *OWN_MODELS, *MODELS])
    dtype = choose(["float32", "bfloat16", "float64", "float16"], [6, 4, 1, 1])
    if model in ONE_DTYPE or (model in SLOW_IN_LOW_PRECISION and dtype != "float64"):
        dtype = "float32"
    low = DTYPES[dtype] in LOW_PRECISION
    sparse = model.startswith("sparse")
    optimizer = choose(FOR_SPARSE) if sparse else choose([*ON_ANY_DEVICE, "adamw", "adamw", "momentum"])
    in_backward = rng.random() < 0.2 and "in_backward" not in left_out
    # bf16 models are swapped with masters, as a rule.
    masters = low and not sparse and "masters" not in left_out and rng.random() < 0.6
    if low and not masters and optimizer in NOT_IN_LOW_PRECISION:
        optimizer = "adamw"
    store = choose(["nvme", "cpu", "none"], [6, 2, 2])
    parameter = choose(["none", "nvme"])
    placement = Placement(
        optimizer=store,
        gradient=choose(["none", "nvme"], [3, 2]),
        parameter=parameter,
        masters=masters,
        in_backward=in_backward,
        bucket_bytes=choose([16384, 32768, 1 << 20], [3, 1, 1]),
        spare_bytes=choose([0, 8192, 1 << 22], [1, 1, 1]),
        resident_bytes=choose([0, 20480], [4, 1]),
        checked=rng.random() < 0.2,
        drives=choose([1, 2], [8, 1]),
        built_on_disk=parameter == "nvme" and rng.random() < 0.3,
        moves_all=rng.random() < 0.7,
        packed=random.Random(f"packed {seed}").random() < 0.4,
        native=random.Random(f"native {seed}").choice(("on", "on", "off")),
    )
    if store == "none" and placement.parameter == "nvme":
        # torch's own step may ask for all parameters at once.
        placement = dataclasses.replace(placement, spare_bytes=1 << 22)
    names = [name for name in ACTIONS if name not in left_out]
    weights = [ACTIONS[name][0] for name in names]
    actions: list[Action] = []
    planned: list[str] = []
    length = rng.randint(3, 8)
    while len(actions) < length:
        if not planned and rng.random() < 0.2:  # What users do one after the other is rare among random actions.
            planned += [name for name in rng.choice(HABITS) if name in names]
        name = planned.pop(0) if planned else rng.choices(names, weights)[0]
        met = {action.name for action in actions}
        if name in NEEDS and not met & set(NEEDS[name]) and rng.random() < 0.9:
            continue
        numbers = [rng.randrange(1, 1000), *(rng.randrange(100) for _ in range(ACTIONS[name][1] - 1))]
        if name in ("interrupt", "breaks"):
            numbers[1] = int(10 ** rng.uniform(0, 3 if name == "interrupt" else 1.5))
        if name == "train" and rng.random() < 0.6:
            numbers[1:] = [0, 0, 0]
        elif name == "train":
            numbers[3] %= 2
        if name in ("save", "load"):
            numbers[1] %= 3
        actions.append(Action(name, tuple(numbers), rng.choices((0, 1, 2, 3), (5, 1, 1, 1))[0]))
    first = [Action("train", (rng.randrange(1, 1000), 0, 0, 0))] if rng.random() < 0.8 else []
    last = [Action("train", (rng.randrange(1, 1000), 0, 0, 0))] * rng.randint(0, 2)
    return Program(
        model=model,
        dtype=dtype,
        optimizer=optimizer,
        optimizers=choose([1, 2], [4, 1]),
        groups=choose([1, 2, 3], [3, 2, 1]),
        left_out=choose([0, 1, 2], [4, 1, 1]),
        passes=choose([1, 2, 3], [4, 1, 1]),
        threads=choose([1, 2], [2, 1]),
        placement=placement,
        actions=(*first, *actions, *last),
    )


# --- Making them small ------------------------------------------------------------------------------------------------


def minimised(program: Program, fails: Callable[[Program], bool], seconds: float = 40.0) -> Program:
    """A smaller program that fails too: no action can be left out of it, and nothing be simpler alone.

    Args:
        fails: whether a program fails in the way that is looked for.
        seconds: for how long at most; what was found until then is small enough to read.
    """
    end = time.monotonic() + seconds

    def smaller() -> bool:
        nonlocal program
        for candidate in _simpler(program):
            if time.monotonic() > end:
                return False
            if fails(candidate):
                program = candidate
                return True
        return False

    length = len(program.actions)
    while length > 1:  # Halves, quarters, ...: whole stretches of actions at once.
        length = -(-length // 2)
        at = 0
        while at < len(program.actions) and time.monotonic() < end:
            candidate = dataclasses.replace(program, actions=program.actions[:at] + program.actions[at + length :])
            if candidate.actions and fails(candidate):
                program = candidate
            else:
                at += length
    while smaller():
        pass
    return program


def _simpler(program: Program) -> Iterator[Program]:
    """Programs that are simpler than `program` in one way each, those that save most first."""
    actions = program.actions
    for i in range(len(actions)):
        if len(actions) > 1:
            yield dataclasses.replace(program, actions=actions[:i] + actions[i + 1 :])
    if program.model != SIMPLER_MODELS[0]:
        simpler = SIMPLER_MODELS
        if program.model in simpler:
            simpler = simpler[: simpler.index(program.model)]
        for model in simpler:
            yield dataclasses.replace(program, model=model)
    for item, change in ((program, lambda new: new), (program.placement, None)):
        for f in dataclasses.fields(item):
            if f.name in ("model", "placement", "actions") or getattr(item, f.name) == f.default:
                continue
            new = dataclasses.replace(item, **{f.name: f.default})
            yield change(new) if change else dataclasses.replace(program, placement=new)  # type: ignore[misc]
    for i, action in enumerate(actions):
        simpler_actions = []
        if action.look:
            simpler_actions.append(dataclasses.replace(action, look=0))
        for at, number in enumerate(action.numbers):
            for smaller in dict.fromkeys((0, 1, number // 2)):
                if smaller < number:
                    numbers = (*action.numbers[:at], smaller, *action.numbers[at + 1 :])
                    simpler_actions.append(dataclasses.replace(action, numbers=numbers))
        for simpler_action in simpler_actions:
            yield dataclasses.replace(program, actions=(*actions[:i], simpler_action, *actions[i + 1 :]))
