"""`Twin`: an optimizer of the user's class with the user's options, over small tensors of ours.

It touches neither the user's parameters nor the random state of the host or of a device.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError, is_memory_shortage
from swapper.io.devices import advise_on_memory, seeded_generators
from swapper.optimizer.own_numbers import numbers_in, own_copy
from swapper.optimizer.single_settings import Settings, lent_manager
from swapper.optimizer.step_function import class_step
from swapper.tensors.sharded import local_of

__all__ = [
    *("OWN_ATTRIBUTES", "PRIMES", "Twin", "equal", "own_numbers", "package_of", "raise_if_memory_is_short"),
    *("same_bits", "seeded", "small_shape"),
]

OWN_ATTRIBUTES = frozenset({"step", "swapper", "__getstate__", "load_state_dict"})
"""Names that wrapping puts on the user's instance."""

_REPLACED = frozenset({"state", "param_groups"})
"""Names of attributes that a twin has anew."""

_CPU = torch.device("cpu")
PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)
"""Sizes of small tensors."""
_early: dict[type[Optimizer], bool] = {}


class Twin:
    """A twin of the user's optimizer over tensors of ours. Its methods raise `ConfigError` where the class fails.

    Where it fails because memory is short that says nothing of the class: see `raise_if_memory_is_short`.

    Args:
        memo: of copies, which is shared by twins that have an object of the user's in common.
        settings: of each parameter alone; see `single_settings`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        *,
        state_to_start_with: bool | None = None,
        memo: dict[int, Any] | None = None,
        settings: Settings | None = None,
    ) -> None:
        memo = {} if memo is None else memo
        cls = type(optimizer)
        on_cpu, package = tensors[0].is_cpu, package_of(optimizer)
        self._step = class_step(cls)
        self._name, self._package = cls.__name__, package
        self.parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        self.group = {
            key: _tensor_of(value, on_cpu, memo) if isinstance(value, torch.Tensor) else _own(value, package, memo)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        if "capturable" in self.group and on_cpu:
            self.group["capturable"] = False
        if "lr" in self.group and self.group["lr"] == 0:
            self.group["lr"] = 1e-3  # A warm-up starts at 0, where nothing would be seen to change.
        self.optimizer: Optimizer = cls.__new__(cls)
        for key, value in {**_tables_of_class(cls), **vars(optimizer)}.items():
            if key not in OWN_ATTRIBUTES and key not in _REPLACED:
                vars(self.optimizer)[key] = own_copy(value, package, memo)
        own: dict[torch.Tensor, Settings] = dict.fromkeys(self.parameters, settings) if settings else {}
        vars(self.optimizer).update(lent_manager(optimizer, [{"params": self.parameters}], own))
        self.optimizer._optimizer_step_pre_hooks = OrderedDict()
        self.optimizer._optimizer_step_post_hooks = OrderedDict()
        self.optimizer.state = defaultdict(dict)
        self.optimizer.param_groups = [self.group]
        if _makes_state_early(optimizer, group) if state_to_start_with is None else state_to_start_with:
            self._give_initial_state(optimizer, group)
        self.group["params"] = self.parameters
        self.returned: object = None  # by the last step
        self.given: list[torch.Tensor | None] = []  # the gradients of the last step

    def _give_initial_state(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        dim, dtype = self.parameters[0].dim(), self.parameters[0].dtype
        # Of DTensors the local ones, which may be empty: then what they start with does not matter.
        order = sorted(group["params"], key=lambda p: (not local_of(p).numel(), p.dtype != dtype, p.dim() != dim))
        for known in order:
            state = _state_in_memory(optimizer).get(known)
            if not state or not known.numel():
                continue
            like = local_of(known)
            for parameter in self.parameters:
                self.optimizer.state[parameter] = {
                    key: _initial(local_of(value), like, parameter)
                    if isinstance(value, torch.Tensor)
                    else _own(value, package_of(optimizer), {})
                    for key, value in state.items()
                }
            return

    def take_state(self, whole: Twin, cuts: Sequence[tuple[int, int]]) -> None:
        """Begin with the state, if any, of the only parameter of `whole`, of which this one's are `cuts`.

        What a class makes early it may make of the parameter's values, and tensors of one dimension have others' state.
        """
        (known,) = whole.parameters
        for key, value in whole.optimizer.state.get(known, {}).items():
            for parameter, (start, stop) in zip(self.parameters, cuts, strict=True):
                if not isinstance(value, torch.Tensor):
                    self.optimizer.state[parameter][key] = _own(value, self._package, {})
                else:
                    part = value.reshape(-1)[start:stop] if value.shape == known.shape else value
                    self.optimizer.state[parameter][key] = part.clone()

    def step(self, gradients: Sequence[torch.Tensor | None], only: Sequence[int] | None = None) -> None:
        """Step all parameters, or those of these numbers, each with its gradient, if it has one."""
        chosen = self.parameters if only is None else [self.parameters[i] for i in only]
        for parameter, gradient in zip(chosen, gradients, strict=True):
            sparse = isinstance(self.optimizer, torch.optim.SparseAdam)
            parameter.grad = None if gradient is None else gradient.to_sparse() if sparse else gradient.clone()
        self.given = [parameter.grad for parameter in chosen]
        self.group["params"] = list(chosen)
        self.call([self.group])

    def call(self, groups: list[dict[str, Any]]) -> None:
        """Call the class's step with `groups`, whose parameters have gradients."""
        self.optimizer.param_groups = groups
        chosen = [p for group in groups for p in group["params"]]
        try:
            with seeded_generators(self.parameters[0].device):
                self.returned = self._step(self.optimizer)
        except Exception as error:
            raise_if_memory_is_short(error, self._name, chosen)
            train = "Call its train() first, if plain steps need that. " * hasattr(self.optimizer, "train")
            raise ConfigError(
                f"{self._name} failed in a trial step on small tensors of shape "
                f"{[tuple(p.shape) for p in chosen]}, so how to swap its state is unknown: {error!r}. "
                f"{train}Let it step tensors of any shape, without a closure, or set offload_optimizer.device to none"
            ) from error

    @property
    def options(self) -> dict[str, Any]:
        """The options of the group, without its parameters."""
        return {key: value for key, value in self.group.items() if key != "params"}

    def give_options(self, options: Mapping[str, Any]) -> None:
        """Have the group hold `options`, of tensors copies, and nothing that the class has put in."""
        self.group.clear()
        self.group.update({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()})

    def step_apart(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Step one parameter after the other, each with the options that the group had before, as buckets are."""
        before = dict(self.group)
        after: dict[str, Any] = {}
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self.give_options(before)
            self.step([gradient], only=[i])
            after = dict(self.group)
        self.group.update(after)


def raise_if_memory_is_short(error: Exception, name: str, parameters: Sequence[torch.Tensor]) -> None:
    """If a trial step of the class `name` on `parameters` has failed with `error` because memory is short, say so.

    Raises:
        torch.OutOfMemoryError: `error`, that of a device.
        MemoryError: of the host.
    """
    if not is_memory_shortage(error):
        return
    what = f"memory is short for a trial step of {name} on tensors of shape {[tuple(p.shape) for p in parameters]}"
    if isinstance(error, torch.OutOfMemoryError):
        advise_on_memory(error, what)
        raise error
    raise MemoryError(f"{what}: {error!r}") from error


def own_numbers(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield what `numbers_in` finds in the attributes that are the class's own."""
    for key, value in vars(optimizer).items():
        if key not in OWN_ATTRIBUTES and key not in _REPLACED and key != "defaults":
            yield from numbers_in(value, key, package_of(optimizer))


def package_of(optimizer: Optimizer) -> str:
    """Return the name of the top package that the class is from."""
    return type(optimizer).__module__.split(".")[0]


def _own(value: Any, package: str, memo: dict[int, Any]) -> Any:
    """A copy, also of what is in containers: a class may keep in them what it has computed once for all parameters."""
    copied = own_copy(value, package, memo)
    return copy.copy(value) if copied is value else copied


def _tensor_of(value: torch.Tensor, to_cpu: bool, memo: dict[int, Any]) -> Any:
    """A copy of an option, which groups may share."""
    if id(value) not in memo:
        memo[id(value)] = _copied(value, to_cpu)
    return memo[id(value)]


def _tables_of_class(cls: type[Optimizer]) -> dict[str, Any]:
    """Containers that are attributes of the class itself, and not torch's: what it writes there all instances see."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__.split(".")[0] not in ("torch", "builtins")]
    values = {key: value for base in bases for key, value in vars(base).items() if not key.startswith("__")}
    return {key: value for key, value in values.items() if isinstance(value, (dict, list, set, deque))}


def _makes_state_early(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """True if the class, like Adagrad, makes its state when it is constructed and expects it in the first step."""
    cls = type(optimizer)
    if not any(_state_in_memory(optimizer).values()):
        return _early.get(cls, False)
    if cls not in _early:
        p = group["params"][0]
        shape = small_shape(p)
        for early in (False, True):
            try:
                twin = Twin(optimizer, group, [seeded(shape, p.dtype, 0)], state_to_start_with=early)
                twin.step([seeded(shape, p.dtype, 1)])
            except ConfigError:
                continue
            _early[cls] = early
            break
    return _early.get(cls, False)  # False too if these options fail either way: the class may not with others.


def _state_in_memory(optimizer: Optimizer) -> Mapping[torch.Tensor, Any]:
    """The state, unless it is swapped."""
    return {} if "swapper" in vars(optimizer) else optimizer.state


def _initial(value: torch.Tensor, known: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if value.shape == known.shape:
        start = value.flatten()[0] if value.numel() else value.new_zeros(())
        return torch.zeros_like(parameter).copy_(start if parameter.is_complex() else torch.real(start))
    return _copied(value, parameter.is_cpu)


def _copied(value: torch.Tensor, to_cpu: bool) -> torch.Tensor:
    return value.detach().cpu().clone() if to_cpu else value.detach().clone()


def small_shape(like: torch.Tensor) -> tuple[int, ...]:
    """A shape of as many dimensions as `like` has, each of another size, and none larger than there."""
    return tuple(min(size, PRIMES[i % len(PRIMES)]) for i, size in enumerate(like.shape))


def seeded(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device = _CPU) -> torch.Tensor:
    """Make a tensor of normal random values, the same for a seed on each device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(dtype).to(device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the values are the same bits in the same order, whatever the shapes."""
    a, b = (each.reshape(-1).cpu().contiguous() for each in (a, b))  # Also of what is expanded.
    a, b = (each.as_strided(each.shape, (1,)) for each in (a, b))  # One element is contiguous with any stride.
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def equal(a: object, b: object) -> bool:
    """True if two values of a state or of a group are the same: tensors to the bit, containers item by item."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and same_bits(a.reshape(-1), b.reshape(-1))
    if isinstance(a, (list, tuple, deque)) and isinstance(b, (list, tuple, deque)):
        return type(a) is type(b) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if dataclasses.is_dataclass(a) and not isinstance(a, type):  # Its own way asks tensors whether they are true.
        names = [field.name for field in dataclasses.fields(a)]
        return type(a) is type(b) and all(equal(getattr(a, name), getattr(b, name)) for name in names)
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):  # Arrays, which are many truths.
        alike = all(getattr(a, name, None) == getattr(b, name, None) for name in ("dtype", "shape"))
        return type(a) is type(b) and alike and bool(a.tobytes() == b.tobytes())
    if type(a) is not type(b):
        return False
    if isinstance(a, itertools.count):
        return repr(a) == repr(b)
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):  # Else a copy is equal to nothing.
        return equal(vars(a), vars(b))
    return bool(a == b) or bool(a != a and b != b)  # NaN is as it was.
