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
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_iter, tree_map_only

from swapper.errors import SwapError
from swapper.tensors.grad_modes import outside_of_inference

__all__ = [
    "LAYOUT",
    "METADATA",
    "UNFILLED",
    "AwayGradient",
    "EvictedParameter",
    "EvictedView",
    "GradientAwayParameter",
    "GradientHome",
    "Home",
    "PartOfView",
    "Source",
    "ViewOfParameter",
    "away_gradient",
    "bring_back_gradients",
    "can_have_gradient_away",
    "clear_gradient_home",
    "evict",
    "fill_gradient",
    "gathered",
    "gradient_lent",
    "home_of",
    "is_ordinary",
    "is_saving",
    "let_viewed_stay",
    "make_ordinary",
    "name_of",
    "raw_gradient",
    "restore",
    "restored_class",
    "run",
    "set_gradient_home",
    "set_raw_gradient",
    "settle",
]

_ATTRIBUTE = "_swapper_home"
"""Name of the attribute of a parameter that says where its values come from."""

_ADDRESS = "_swapper_address"
"""Name of the attribute of a parameter that keeps the copy whose address it gave."""

UNFILLED = "_swapper_unfilled"
"""Name of the attribute of a tensor that has no values yet; see `swapper.tensors.unfilled`."""

_GRADIENT = "_swapper_gradient_home"
"""Name of the attribute of a parameter that says where its gradient is, while that is away."""


_TensorT = TypeVar("_TensorT", bound=torch.Tensor)

_GRAD = vars(torch._C.TensorBase)["grad"]
"""The attribute as autograd has it, whatever the class of a parameter makes of it."""

_MAKES_PARAMETERS = torch.nn.Parameter.__new__.__code__
_MAKES_STATE_DICTS = torch.nn.Module._save_to_state_dict.__code__


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

    @property
    def keeper(self) -> object:
        """What has to live for the values to be there."""

    def lasting(self) -> torch.Tensor:
        """A copy of the values now in memory that costs disk: for those who want the address of all parameters."""

    def present(self, homes: Iterable[Home]) -> AbstractContextManager[None]:
        """Within it the values of the parameters of `homes`, all of this owner, are there, this one's among them."""

    def gather(self, homes: Iterable[Home]) -> AbstractContextManager[None]:
        """As `present`, and says beforehand if there is no room for all of them."""

    def surrender(self, parameter: torch.nn.Parameter) -> None:
        """Another home has the values of `parameter` now. Only if `temporary`."""

    def stay(self, parameter: torch.nn.Parameter) -> None:
        """Let `parameter`, which is `viewed`, have its values where they are now, for good. Only if `temporary`."""

    def deepcopy(self, parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        """What `copy.deepcopy` of the parameter gives.

        Raises:
            SwapError: it cannot be copied.
        """


class GradientHome(Protocol):
    """Where gradients are that are away."""

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What reading `parameter.grad` gives."""

    def bring_back(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Have the gradient in memory again, for good."""

    def clear(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Forget the gradients of `parameters`."""

    def set_zero(self, parameter: torch.nn.Parameter) -> None:
        """Let the gradient be zeros; what it was is not needed."""


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
"""What is answered without the values: functions and attributes (getter, setter, deleter) of a tensor."""

LAYOUT = frozenset({"stride", "is_contiguous", "dim_order"})
"""What is answered for the strides that the parameter has when its values are there."""


def name_of(func: Callable[..., Any]) -> str:
    """How the tables above name what `__torch_function__` was called for."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):  # of an attribute
        return f"{name} {getattr(getattr(func, '__self__', None), '__name__', '')}"
    return name


class GradientAwayParameter(torch.nn.Parameter):
    """The class of a parameter while its values are there and its gradient is away."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; if it is away, a tensor whose values come, for good, when they are used."""
        away = self.__dict__.get(_GRADIENT)
        if away is None:
            return raw_gradient(self)
        home: GradientHome | None = away()
        return away_gradient(self, None, ()) if home is None else home.gradient_of(self)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if isinstance(gradient, AwayGradient):
            gradient.bring_back()
        before = raw_gradient(self)
        set_raw_gradient(self, gradient)  # First: it refuses what is no gradient of this.
        away = self.__dict__.get(_GRADIENT)
        if away is None:
            return
        home: GradientHome | None = away()
        try:
            if home is not None:
                home.clear([self])
        except BaseException:
            set_raw_gradient(self, before)
            raise
        clear_gradient_home(self)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain parameter; as always its gradient is not copied."""
        if id(self) not in memo:
            values = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(values, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        twin = torch.nn.Parameter(self.data, self.requires_grad)
        twin.__dict__.update({name: value for name, value in vars(self).items() if name != _GRADIENT})
        return twin.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


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
        name = name_of(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in LAYOUT and (home := home_of(args[0])) is not None:
            like = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                like = torch.empty_strided(like.shape, home.stride, dtype=like.dtype, device="meta")
                return func(like, *args[1:], **kwargs)
        if name == "data_ptr" and (home := home_of(args[0])) is not None:
            # Where the values come in the pool others will be next: of two parameters the address would be the same.
            lasting = vars(args[0])[_ADDRESS] = home.lasting()
            return lasting.data_ptr()
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        if func is torch.autograd.backward and not any(home_of(root) for root in args[0]):
            return _backward(*args, **kwargs)
        if func is torch.Tensor.detach:
            caller = sys._getframe(1).f_code
            if caller is _MAKES_PARAMETERS:
                return cls._in_memory(args[0])
            if caller is _MAKES_STATE_DICTS and (home := home_of(args[0])) is not None:
                return EvictedView(ViewOfParameter(args[0], home))
        return run(func, args, kwargs)

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


class Source(Protocol):
    """Where the values of an `EvictedView` come from."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def homes(self) -> Sequence[Home]:
        """What must be present for `real`."""

    def real(self) -> torch.Tensor:
        """The tensor itself."""

    def lasting(self) -> torch.Tensor:
        """The values in memory that stays where it is as long as somebody has it."""


class ViewOfParameter:
    """The values of a parameter, whether they are away or not. See `Source`."""

    def __init__(self, parameter: torch.nn.Parameter, home: Home) -> None:
        self.shape, self.stride, self.dtype = parameter.shape, home.stride, parameter.dtype
        self.parameter = parameter
        self._keeper = home.keeper
        self._lasting: torch.Tensor | None = None

    def homes(self) -> Sequence[Home]:
        """That of the parameter, if it is still swapped."""
        home = home_of(self.parameter)
        return () if home is None else (home,)

    def real(self) -> torch.Tensor:
        """As ordinary state dicts have it."""
        return self.parameter.detach()

    def lasting(self) -> torch.Tensor:
        """A copy that is the same for all views of the parameter, and is kept."""
        home = home_of(self.parameter)
        self._lasting = self.real() if home is None else home.lasting()
        return self._lasting


class PartOfView:
    """What `view` or an index by integers and slices gives of a tensor of a state dict. See `Source`."""

    def __init__(self, whole: Source, func: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> None:
        like = func(torch.empty_strided(whole.shape, whole.stride, dtype=whole.dtype, device="meta"), *args)
        self.shape, self.stride, self.dtype = like.shape, like.stride(), like.dtype
        self.whole, self._func, self._args = whole, func, args

    def homes(self) -> Sequence[Home]:
        """Those of the whole."""
        return self.whole.homes()

    def real(self) -> torch.Tensor:
        """A view of the whole."""
        return self.of(self.whole.real())

    def lasting(self) -> torch.Tensor:
        """A view of the copy of the whole: where a part begins and ends fits where the whole does."""
        return self.of(self.whole.lasting())

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of any tensor of the shape and strides of the whole."""
        return self._func(whole, *self._args)


class EvictedView(torch.Tensor):
    """What a state dict has for an evicted parameter: it shares the parameter's memory whenever that is there.

    So it reads as the parameter is at that time, what is written to it is the parameter's, and until it is used it
    costs nothing. Only its address, and what is saved of it, are those of a copy in a mapped file.
    """

    _swapper_source: Source

    @staticmethod
    def __new__(cls, source: Source) -> EvictedView:
        """One for the values of `source`. It has no memory: what C++ code does with it comes back as a dispatch."""
        view: EvictedView = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, strides=source.stride, dtype=source.dtype, device=torch.device("cpu")
        )
        view._swapper_source = source
        return view

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
        name = name_of(func)
        first = args[0] if args else None
        if isinstance(first, EvictedView):
            if name in _STATEFUL:
                if name.endswith(("requires_grad_", " requires_grad")) and not (
                    args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
                ):
                    return first  # It does not already.
                raise SwapError(
                    f"{name.split()[-1]} of a tensor of a state dict whose parameters are swapped: "
                    "make it a copy first (clone)"
                )
            if name in ("detach", "__get__ data"):
                if sys._getframe(1).f_code is _MAKES_PARAMETERS:
                    raise SwapError(
                        "a parameter cannot be made of a tensor of a state dict whose parameters are swapped; "
                        "make it a copy first (clone)"
                    )
                return EvictedView(first._swapper_source)
            if name in _ADDRESSES:
                parameter = _parameter_of(first._swapper_source)
                mark = None if parameter is None else vars(parameter).get(UNFILLED)
                if mark is not None and is_saving(name, sys._getframe(1)):
                    mark.refuse(parameter)
                lasting = first._swapper_source.lasting()
                with torch._C.DisableTorchFunctionSubclass():
                    return func(lasting, *args[1:], **kwargs)
            if name in METADATA or name in LAYOUT:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if not kwargs and _makes_part(name, args[1:]):
                return EvictedView(PartOfView(first._swapper_source, func, args[1:]))
        return run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, called by C++ code, with the values there."""
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        source = self._swapper_source
        of = id(source.parameter) if isinstance(source, ViewOfParameter) else id(source)
        copy: torch.Tensor | None = memo.get(("values", of))
        if copy is None:
            copy = memo["values", of] = self.clone(memory_format=torch.preserve_format)
            return copy
        return copy.detach()  # Tied parameters stay so.


def _makes_part(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a method of a tensor, called with `args`, is one that `PartOfView` is for. A list of indices copies."""
    if name == "view":
        sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
        return all(type(size) is int for size in sizes)
    index = args[0] if name == "__getitem__" else None
    return all(type(item) in (int, slice) for item in (index if isinstance(index, tuple) else (index,)))


_STATEFUL = frozenset(
    {
        "requires_grad_", "__set__ requires_grad", "__set__ grad", "__set__ data", "set_", "resize_", "resize_as_",
        "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "share_memory_", "t_", "transpose_",
        "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "rename_", "__set__ names", "detach_",
        "__set__ _backward_hooks", "__set__ _post_accumulate_grad_hooks", "__set__ _grad",
    }
)  # fmt: skip
"""What would change a view itself, and not the values."""

_ADDRESSES = frozenset(
    {"data_ptr", "untyped_storage", "storage", "_typed_storage", "__reduce_ex__", "_reduce_ex_internal"}
)
"""What gives away where the values are, for use at any later time."""


def is_saving(name: str, caller: FrameType) -> bool:
    """Whether `caller` asks for an address to save what is there. Others compare addresses, or write to them."""
    by_address = caller.f_globals.get("__name__") == "safetensors.torch" and caller.f_code.co_name in _SAVERS
    return name in ("__reduce_ex__", "_reduce_ex_internal") or (name == "data_ptr" and by_address)


_SAVERS = ("_to_ndarray", "_tobytes")
"""Of safetensors: what reads a tensor by its address."""


def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, bare: bool = False) -> Any:
    """Run `func` with all values there that are away.

    Args:
        bare: let it have tensors without values too, which else see to it themselves that nothing reads them.
    """
    homes: list[Home] = []
    unfilled = False
    views: dict[int, EvictedView] = {}
    for item in tree_iter((args, kwargs)):
        if isinstance(item, EvictedView):
            views[id(item)] = item
            homes += item._swapper_source.homes()
            parameter = _parameter_of(item._swapper_source)
            unfilled = unfilled or (parameter is not None and UNFILLED in vars(parameter))
        elif (home := home_of(item)) is not None:
            homes.append(home)
            unfilled = unfilled or UNFILLED in vars(item)
        elif isinstance(item, AwayGradient):
            item.bring_back()
    plainly = nullcontext() if unfilled and not bare else torch._C.DisableTorchFunctionSubclass()
    with _present(homes), plainly:
        if not views:
            return func(*args, **kwargs)
        real = {key: view._swapper_source.real() for key, view in views.items()}
        args, kwargs = tree_map_only(EvictedView, lambda view: real[id(view)], (args, kwargs))
        result = func(*args, **kwargs)
        view_of = {id(real[key]): view for key, view in views.items()}  # What works in place gives it back.
        if type(result) in (list, tuple):
            return type(result)(view_of.get(id(item), item) for item in result)
        return view_of.get(id(result), result)


def _parameter_of(source: Source) -> torch.nn.Parameter | None:
    """The parameter that has the values of `source`, if one has."""
    while isinstance(source, PartOfView):
        source = source.whole
    return source.parameter if isinstance(source, ViewOfParameter) else None


def _present(homes: Sequence[Home]) -> AbstractContextManager[object]:
    """Within it the values of the parameters of `homes` are there, whosever they are."""
    return _together(homes, lambda home: home.present) if homes else nullcontext()


def gathered(parameters: Iterable[torch.nn.Parameter]) -> AbstractContextManager[object]:
    """Within it `parameters` have their values, and are of their own class."""
    homes = [home for parameter in parameters if (home := home_of(parameter)) is not None]
    return _together(homes, lambda home: home.gather) if homes else nullcontext()


def _together(
    homes: Sequence[Home], way: Callable[[Home], Callable[[Iterable[Home]], AbstractContextManager[None]]]
) -> AbstractContextManager[object]:
    by_owner: dict[object, list[Home]] = {}
    for home in homes:
        by_owner.setdefault(home.owner, []).append(home)
    if len(by_owner) == 1:
        return way(homes[0])(homes)
    with ExitStack() as stack:
        for those in by_owner.values():
            stack.enter_context(way(those[0])(those))
        return stack.pop_all()


class AwayGradient(torch.Tensor):
    """The gradient of a parameter, away. It becomes a plain tensor, the same object, when its values are used.

    Attributes:
        parameter: whose gradient it is.
        home: where it is; None if nowhere any more.
        away_stride: its strides when its values are there.
    """

    parameter: torch.nn.Parameter
    home: GradientHome | None
    away_stride: tuple[int, ...]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, with the values there unless it only asks for metadata or overwrites them with zeros."""
        kwargs = kwargs or {}
        name = name_of(func)
        like = args[0] if args else None
        if name in METADATA and isinstance(like, cls) and _leaves_alone(name, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in LAYOUT and isinstance(like, cls):
            with torch._C.DisableTorchFunctionSubclass():
                meta = torch.empty_strided(like.shape, like.away_stride, dtype=like.dtype, device="meta")
                return func(meta, *args[1:], **kwargs)
        if name == "zero_" and isinstance(like, cls) and like.home is not None:
            like.home.set_zero(like.parameter)
            return like
        if name == "_foreach_zero_" and args and isinstance(like, (list, tuple)):
            for gradient in like:
                gradient.zero_()
            return None
        for item in tree_iter((args, kwargs)):
            if isinstance(item, cls):
                item.bring_back()
        return func(*args, **kwargs)

    def bring_back(self) -> None:
        """Have the values: this is a plain tensor then.

        Raises:
            SwapError: they are gone.
            SwapIOError: they could not be read.
        """
        if self.home is not None:
            self.home.bring_back(self.parameter)
        if isinstance(self, AwayGradient):
            raise SwapError(
                "this gradient was on disk, and its optimizer was closed or is gone: the values cannot be read"
            )


def _leaves_alone(name: str, args: tuple[Any, ...]) -> bool:
    """Whether what sets an attribute sets it to what it is: a gradient that is away has no history and gets none."""
    return name not in ("__set__ requires_grad", "requires_grad_") or (len(args) > 1 and args[1] is False)


def away_gradient(parameter: torch.nn.Parameter, home: GradientHome | None, stride: tuple[int, ...]) -> AwayGradient:
    """What stands for the gradient of `parameter` that is in `home`, or gone, until its values are used."""
    with outside_of_inference(), torch._C.DisableTorchFunctionSubclass():
        hollow = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        gradient: AwayGradient = torch.Tensor._make_subclass(AwayGradient, hollow)
        gradient.parameter, gradient.home = parameter, home
        gradient.away_stride = stride or tuple(torch.empty(parameter.shape, device="meta").stride())
    return gradient


def fill_gradient(gradient: AwayGradient, values: torch.Tensor) -> torch.Tensor:
    """Let `values` be those of `gradient`, which is a plain tensor from now on."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient.data = values
    gradient.__dict__.clear()
    gradient.__class__ = torch.Tensor  # type: ignore[assignment]
    return gradient


def _grad(outputs: Any, inputs: Sequence[Any], *, materialize_grads: bool = False, **options: Any) -> Any:
    """`torch.autograd.grad` of parameters that are away: it needs to know which they are, not their values.

    Backward runs Python code, which must see evicted parameters for what they are: so the call has none of them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        edges = [get_gradient_edge(p) if isinstance(p, torch.Tensor) else p for p in inputs]
    options["allow_unused"] = materialize_grads or options.get("allow_unused", False)
    options["grad_outputs"] = tree_map_only(EvictedParameter, torch.clone, options.get("grad_outputs"))
    gradients = torch.autograd.grad(outputs, edges, **options)
    if not materialize_grads:
        return gradients
    return tuple(torch.zeros_like(p) if g is None else g for p, g in zip(inputs, gradients, strict=True))


def _backward(tensors: Sequence[Any], *, inputs: Sequence[Any], **options: Any) -> None:
    """`torch.autograd.backward` into parameters some of which are away. See `_grad`."""
    with torch._C.DisableTorchFunctionSubclass():
        edges = [get_gradient_edge(p) if isinstance(p, torch.Tensor) else p for p in inputs]
    torch.autograd.backward(tensors, inputs=edges, **options)


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
    with outside_of_inference():  # Else the parameter would be one of that mode, and be of no use after it.
        hollow = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    if type(parameter) is EvictedParameter or UNFILLED in vars(parameter):  # This is no use of its values.
        _set_class(parameter, torch.nn.Parameter)
    parameter.data = hollow
    parameter.__class__ = EvictedParameter


def restore(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Let `values`, of the parameter's shape and dtype, be its values, without a copy."""
    # There is no call in between, so Ctrl-C cannot leave a parameter of an ordinary class without values.
    parameter.__class__ = GradientAwayParameter if _GRADIENT in parameter.__dict__ else torch.nn.Parameter
    parameter.data = values
    if (mark := vars(parameter).get(UNFILLED)) is not None:
        _set_class(parameter, mark.parameter_class)


def restored_class(parameter: torch.nn.Parameter) -> type[torch.nn.Parameter]:
    """The class of `parameter` while its values are there."""
    return GradientAwayParameter if _GRADIENT in parameter.__dict__ else torch.nn.Parameter


def is_ordinary(parameter: torch.nn.Parameter) -> bool:
    """Whether its class is that of all parameters, as far as swapper did not change it."""
    mark = vars(parameter).get(UNFILLED)
    return type(parameter) in (torch.nn.Parameter, GradientAwayParameter, mark and mark.parameter_class)


def settle(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """As `restore`, for good: it has no home any more."""
    parameter.__dict__.pop(_ATTRIBUTE, None)
    parameter.__dict__.pop(_ADDRESS, None)
    restore(parameter, values)


def _set_class(parameter: torch.nn.Parameter, of: type[torch.nn.Parameter]) -> None:
    parameter.__class__ = of


def let_viewed_stay(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Those that another home may take over, but that share memory with tensors of the user, are not away any more."""
    for parameter in parameters:
        home = home_of(parameter)
        if home is not None and home.temporary and home.viewed:
            home.stay(parameter)


def make_ordinary(parameter: torch.nn.Parameter) -> None:
    """Give one that `torch.nn.Parameter(...)` made of an evicted one the class that it should have."""
    if type(parameter) is EvictedParameter and home_of(parameter) is None:
        _set_class(parameter, torch.nn.Parameter)


def can_have_gradient_away(parameter: torch.Tensor) -> bool:
    """Whether `set_gradient_home` works: the class must be that of all parameters."""
    return isinstance(parameter, torch.nn.Parameter) and (type(parameter) is EvictedParameter or is_ordinary(parameter))


def raw_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd knows of."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    if isinstance(gradient, AwayGradient):  # Another parameter's, assigned to this one.
        gradient.bring_back()
    return gradient


def set_raw_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Change the gradient that autograd knows of."""
    _GRAD.__set__(parameter, gradient)


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


def bring_back_gradients(parameters: Iterable[torch.nn.Parameter], but: Iterable[object] = ()) -> None:
    """Have the gradients of `parameters` in memory that are away, except with those `but`.

    Raises:
        SwapError: one is gone.
        SwapIOError: one could not be read.
    """
    for p in parameters:
        away = p.__dict__.get(_GRADIENT)
        if away is None or any(away() is home for home in but if home is not None):
            continue
        if isinstance(gradient := p.grad, AwayGradient):
            gradient.bring_back()


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
