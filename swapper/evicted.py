"""Parameters whose values are away: how they look to everybody, and how any use brings the values back.

An evicted parameter stays the object that it was. Its `data` is one NaN expanded to its shape, and its class is
`EvictedParameter`, whose `__torch_function__` sees every use: what asks for metadata is answered as if nothing had
happened, everything else waits until the values are there and then runs on them as it would have done.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_iter

from swapper.errors import SwapError

__all__ = [
    "EvictedParameter",
    "GradientAwayParameter",
    "GradientHome",
    "Home",
    "clear_gradient_home",
    "evict",
    "gradient_lent",
    "home_of",
    "make_ordinary",
    "raw_gradient",
    "restore",
    "set_gradient_home",
    "set_raw_gradient",
]

_ATTRIBUTE = "_swapper_home"
"""Name of the attribute of a parameter that says where its values come from."""

_GRADIENT = "_swapper_gradient_home"
"""Name of the attribute of a parameter that says where its gradient is, while that is away."""


_TensorT = TypeVar("_TensorT", bound=torch.Tensor)

_MAKES_PARAMETERS = torch.nn.Parameter.__new__.__code__


class Home(Protocol):
    """Where the values of one parameter come from."""

    @property
    def stride(self) -> tuple[int, ...]:
        """Of the parameter when its values are there."""

    @property
    def owner(self) -> object:
        """Those of one owner are present together. Hashable."""

    @property
    def temporary(self) -> bool:
        """Whether another home may take the parameter over."""

    @property
    def viewed(self) -> bool:
        """Whether tensors that are not ours share the memory of the values."""

    def present(self, homes: Iterable[Home]) -> AbstractContextManager[None]:
        """Within it the values of the parameters of `homes`, all of this owner, are there, this one's among them."""

    def surrender(self, parameter: torch.nn.Parameter) -> None:
        """Another home has the values of `parameter` now. Only if `temporary`."""

    def deepcopy(self, parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        """What `copy.deepcopy` of the parameter gives.

        Raises:
            SwapError: it cannot be copied.
        """


class GradientHome(Protocol):
    """Where gradients are that are away."""

    def bring_back(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Have the gradient in memory again, for good."""

    def clear(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Forget the gradients of `parameters`."""


_METADATA = frozenset(
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
"""What is answered without the values: functions and attributes (getter, setter, deleter) of a tensor."""

_LAYOUT = frozenset({"stride", "is_contiguous", "dim_order"})
"""What is answered for the strides that the parameter has when its values are there."""


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):  # of an attribute
        return f"{name} {getattr(getattr(func, '__self__', None), '__name__', '')}"
    return name


class GradientAwayParameter(torch.nn.Parameter):
    """The class of a parameter while its values are there and its gradient is away."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; one that is away is brought back into memory for good."""
        away = self.__dict__.get(_GRADIENT)
        home = None if away is None else away()
        return raw_gradient(self) if home is None else home.bring_back(self)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        away = self.__dict__.get(_GRADIENT)
        home = None if away is None else away()
        if home is not None:
            home.clear([self])
        set_raw_gradient(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class EvictedParameter(GradientAwayParameter):
    """The class of a parameter while its values are away."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, with the values there unless it only asks for metadata."""
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _LAYOUT and (home := home_of(args[0])) is not None:
            like = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                like = torch.empty_strided(like.shape, home.stride, dtype=like.dtype, device="meta")
                return func(like, *args[1:], **kwargs)
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        if func is torch.Tensor.detach and sys._getframe(1).f_code is _MAKES_PARAMETERS:
            return cls._in_memory(args[0])
        homes = [home for item in tree_iter((args, kwargs)) if (home := home_of(item)) is not None]
        if not homes:  # `func` is about the class, not about one of its parameters.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with _present(homes), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def _in_memory(cls, parameter: torch.Tensor) -> torch.Tensor:
        """What `torch.nn.Parameter(parameter)` makes its result of: shares memory, and must be of the same class."""
        home = home_of(parameter)
        with _present([] if home is None else [home]), torch._C.DisableTorchFunctionSubclass():
            return parameter.detach().as_subclass(cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.Tensor.set_`, which does not ask `__torch_function__`."""
        return self.__torch_function__(torch.Tensor.set_, (), (self, *args), kwargs)

    def as_subclass(self, cls: type[_TensorT]) -> _TensorT:
        """As `torch.Tensor.as_subclass`, which does not ask `__torch_function__`."""
        made: _TensorT = self.__torch_function__(torch.Tensor.as_subclass, (), (self, cls))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        home = home_of(self)
        if home is None:
            refuse_copy()
        return home.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


def _present(homes: Sequence[Home]) -> AbstractContextManager[object]:
    """Within it the values of the parameters of `homes` are there, whosever they are."""
    if not homes:
        return nullcontext()
    by_owner: dict[object, list[Home]] = {}
    for home in homes:
        by_owner.setdefault(home.owner, []).append(home)
    if len(by_owner) == 1:
        return homes[0].present(homes)
    with ExitStack() as stack:
        for together in by_owner.values():
            stack.enter_context(together[0].present(together))
        return stack.pop_all()


def _grad(outputs: Any, inputs: Sequence[Any], *, materialize_grads: bool = False, **options: Any) -> Any:
    """`torch.autograd.grad` of parameters that are away: it needs to know which they are, not their values.

    Backward runs Python code, which must see evicted parameters for what they are: so the call has none of them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        edges = [get_gradient_edge(p) if isinstance(p, torch.Tensor) else p for p in inputs]
    options["allow_unused"] = materialize_grads or options.get("allow_unused", False)
    gradients = torch.autograd.grad(outputs, edges, **options)
    if not materialize_grads:
        return gradients
    return tuple(torch.zeros_like(p) if g is None else g for p, g in zip(inputs, gradients, strict=True))


def refuse_copy() -> NoReturn:
    """What copying and pickling a model meets."""
    raise SwapError(
        "a model whose parameters are swapped cannot be copied or pickled: the copy would need its own place on the "
        "drive. Copy or save model.state_dict(), or copy the model before swapper.offload"
    )


def home_of(item: object) -> Home | None:
    """Where the values of a swapped parameter come from; None for anything else. Whether they are away or not."""
    if not isinstance(item, torch.nn.Parameter):
        return None
    home: Home | None = item.__dict__.get(_ATTRIBUTE)
    return home


def evict(parameter: torch.nn.Parameter, home: Home) -> None:
    """Take the values away from `parameter`. It keeps its shape, dtype, version, gradient and hooks."""
    parameter.__dict__[_ATTRIBUTE] = home
    with torch.inference_mode(False):  # Else the parameter would be one of that mode, and be of no use after it.
        hollow = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    if type(parameter) is EvictedParameter:  # From another home: this is no use of its values.
        _set_class(parameter, torch.nn.Parameter)
    parameter.data = hollow
    parameter.__class__ = EvictedParameter


def restore(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Let `values`, of the parameter's shape and dtype, be its values, without a copy."""
    _set_class(parameter, GradientAwayParameter if _GRADIENT in parameter.__dict__ else torch.nn.Parameter)
    parameter.data = values


def _set_class(parameter: torch.nn.Parameter, of: type[torch.nn.Parameter]) -> None:
    parameter.__class__ = of


def make_ordinary(parameter: torch.nn.Parameter) -> None:
    """Give one that `torch.nn.Parameter(...)` made of an evicted one the class that it should have."""
    if type(parameter) is EvictedParameter and home_of(parameter) is None:
        _set_class(parameter, torch.nn.Parameter)


def raw_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd knows of."""
    gradient: torch.Tensor | None = vars(torch._C.TensorBase)["grad"].__get__(parameter)
    return gradient


def set_raw_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Change the gradient that autograd knows of."""
    vars(torch._C.TensorBase)["grad"].__set__(parameter, gradient)


def set_gradient_home(parameter: torch.nn.Parameter, home: GradientHome) -> None:
    """From now on reading `parameter.grad` asks `home`, of which a weak reference is kept."""
    parameter.__dict__[_GRADIENT] = weakref.ref(home)
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = GradientAwayParameter


def clear_gradient_home(parameter: torch.nn.Parameter) -> None:
    """Undo `set_gradient_home`. Idempotent."""
    parameter.__dict__.pop(_GRADIENT, None)
    if type(parameter) is GradientAwayParameter:
        _set_class(parameter, torch.nn.Parameter)


@contextmanager
def gradient_lent(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> Iterator[None]:
    """Within it `gradient` is the parameter's, as if it had never been away."""
    home = parameter.__dict__.pop(_GRADIENT)
    set_raw_gradient(parameter, gradient)
    try:
        yield
    finally:
        set_raw_gradient(parameter, None)
        parameter.__dict__[_GRADIENT] = home
