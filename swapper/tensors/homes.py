"""Homes bring the values of tensors back; `StandIn` sees every use of a tensor that has no values in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch._compile import _disable_dynamo

from swapper.tensors.attributes import HOME
from swapper.tensors.inner import inner_tensors
from swapper.tensors.sharded import local_of

__all__ = [
    "LAYOUT",
    "METADATA",
    "Call",
    "Home",
    "Parts",
    "StandIn",
    "TemporaryHome",
    "gathered",
    "home_of",
    "present",
]


class Home(Protocol):
    """Brings the values of one parameter."""

    @property
    def name(self) -> str:
        """Of the parameter, for errors."""

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the parameter when its values are in memory."""

    @property
    def owner(self) -> object:
        """Brings the values of all its parameters together. Hashable."""

    @property
    def keeper(self) -> object:
        """Must live as long as the values are wanted."""

    @property
    def temporary(self) -> TemporaryHome | None:
        """This home, if another may take the parameter over."""

    def mapped_copy(self) -> torch.Tensor:
        """A copy of the values in a mapped file: it costs disk, and has an address of its own."""

    def present(self, homes: Iterable[Home]) -> AbstractContextManager[None]:
        """Have the parameters of `homes`, all of this owner and this one's among them, in memory within it."""

    def gather(self, homes: Iterable[Home]) -> AbstractContextManager[None]:
        """As `present`, and raise beforehand if there is no room for all of them."""

    def deepcopy(self, parameter: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """Make what `copy.deepcopy` of the parameter gives.

        Raises:
            SwapError: it cannot be copied.
        """


class Parts(Protocol):
    """Brings one part of a parameter without the others: some indices of its first dimension, or one.

    Attributes:
        rows: how many indices; 0: one, and the part does not have that dimension.
    """

    rows: int

    @property
    def usable(self) -> bool:
        """False once the parts are given up; then the home has the whole, or says why not."""

    def part(self, index: int) -> torch.Tensor:
        """Part number `index`, from 0: without gradient, in memory as long as somebody has the tensor.

        Raises:
            SwapIOError: it could not be read.
        """

    def expect(self, indices: Iterable[int]) -> None:
        """These parts are used next, in this order: start to bring them."""


class TemporaryHome(Home, Protocol):
    """A home from which another may take its parameter over."""

    @property
    def viewed(self) -> bool:
        """True if tensors that are not ours share the memory of the values."""

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Other homes have the values of `parameters` now, all of this owner."""

    def stay(self, parameter: torch.Tensor) -> None:
        """Leave `parameter`, which is `viewed`, its values where they are now, for good."""


def home_of(item: object) -> Home | None:
    """The home of a swapped tensor, whether it is evicted or attached; None for anything else."""
    return getattr(item, HOME, None) if isinstance(item, torch.Tensor) else None


def present(homes: Sequence[Home]) -> AbstractContextManager[object]:
    """Have the values of the parameters of `homes`, of any owners, in memory within it."""
    return _together(homes, lambda home: home.present)


def gathered(parameters: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """Within it `parameters` have their values, and are of their own class. So have the tensors inside them."""
    tensors = dict.fromkeys(inner.tensor for parameter in parameters for inner in inner_tensors("", parameter))
    homes = [home for tensor in map(local_of, tensors) if (home := home_of(tensor)) is not None]
    return _together(homes, lambda home: home.gather)


def _together(
    homes: Sequence[Home], way: Callable[[Home], Callable[[Iterable[Home]], AbstractContextManager[None]]]
) -> AbstractContextManager[object]:
    if not homes:
        return nullcontext()
    by_owner: dict[object, list[Home]] = {}
    for home in homes:
        by_owner.setdefault(home.owner, []).append(home)
    if len(by_owner) == 1:
        return way(homes[0])(homes)
    with ExitStack() as stack:
        for those in by_owner.values():
            stack.enter_context(way(those[0])(those))
        return stack.pop_all()


METADATA = frozenset(
    {
        "__get__ shape", "__get__ dtype", "__get__ device", "__get__ layout", "__get__ ndim", "__get__ names",
        "__get__ requires_grad", "__set__ requires_grad", "__get__ is_leaf", "__get__ grad", "__set__ grad",
        "__delete__ grad", "__get__ grad_fn", "__get__ _grad", "__set__ _grad", "__get__ _grad_fn", "__get__ output_nr",
        "__get__ _version", "__get__ retains_grad", "__get__ _backward_hooks", "__set__ _backward_hooks",
        "__get__ _post_accumulate_grad_hooks", "__set__ _post_accumulate_grad_hooks", "__get__ grad_dtype",
        "__get__ is_cpu", "__get__ is_cuda", "__get__ is_ipu", "__get__ is_maia", "__get__ is_meta",
        "__get__ is_mkldnn", "__get__ is_mps", "__get__ is_mtia", "__get__ is_nested", "__get__ is_quantized",
        "__get__ is_sparse", "__get__ is_sparse_csr", "__get__ is_vulkan", "__get__ is_xla", "__get__ is_xpu",
        "__get__ itemsize", "__get__ nbytes", "__get__ name", "__get__ volatile", "__get__ _base",
        "__len__", "dim", "ndimension", "numel", "nelement", "size", "element_size", "is_floating_point", "is_complex",
        "is_signed", "is_inference", "get_device", "register_hook", "register_post_accumulate_grad_hook",
        "requires_grad_", "is_same_size", "__hash__", "is_conj", "is_neg", "has_names", "dense_dim", "sparse_dim",
    }
)  # fmt: skip
"""Functions and attributes (getter, setter, deleter) of a tensor that are answered without its values."""

LAYOUT = frozenset({"stride", "is_contiguous", "dim_order"})
"""Functions that are answered for the strides that the tensor has when its values are in memory."""


class Call(NamedTuple):
    """A use of tensors, as `__torch_function__` gets it.

    Attributes:
        name: of the function; of an attribute "__get__ NAME", "__set__ NAME" or "__delete__ NAME".
        caller: the Python code that uses them.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    caller: FrameType

    @property
    def first(self) -> Any:
        """The first argument, often the tensor itself."""
        return self.args[0] if self.args else None

    def plainly(self) -> Any:
        """Run it on the tensors as they are, whatever their classes make of it."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.func(*self.args, **self.kwargs)

    def on_layout(self, stride: tuple[int, ...]) -> Any:
        """Run it on a tensor like the first, without memory, that has the strides of the values."""
        with torch._C.DisableTorchFunctionSubclass():
            like = torch.empty_strided(self.first.shape, stride, dtype=self.first.dtype, device="meta")
            return self.func(like, *self.args[1:], **self.kwargs)

    def is_saving(self) -> bool:
        """True if it asks for an address to save the values. Others compare addresses, or write to them."""
        globals_, function = self.caller.f_globals, self.caller.f_code.co_name
        by_address = globals_.get("__name__") == "safetensors.torch" and function in ("_to_ndarray", "_tobytes")
        return self.name in ("__reduce_ex__", "_reduce_ex_internal") or (self.name == "data_ptr" and by_address)


class StandIn(torch.Tensor):
    """Stands for a tensor whose values are not in memory: every use of it comes to `use`.

    Attributes:
        PLAIN: names of what is answered by the tensor as it is, whoever asks, and does not come to `use`.
    """

    PLAIN: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, with the values in memory unless it only asks for metadata."""
        name: str = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):  # of an attribute
            name = f"{name} {getattr(getattr(func, '__self__', None), '__name__', '')}"
        if name in cls.PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _use(cls, name, func, args, kwargs or {})

    @classmethod
    def use(cls, call: Call) -> Any:
        """Answer `call`, which has a tensor of this class among its arguments."""
        raise NotImplementedError


@_disable_dynamo
def _use(
    stand_in: type[StandIn], name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call `stand_in.use`. Within a function that torch compiles, this is not to be compiled."""
    frame = sys._getframe(1)
    while frame.f_code is not _TORCH_FUNCTION and frame.f_back is not None:  # Those of the decorator.
        frame = frame.f_back
    return stand_in.use(Call(name, func, args, kwargs, frame.f_back or frame))


_TORCH_FUNCTION = StandIn.__torch_function__.__func__.__code__  # type: ignore[attr-defined]
