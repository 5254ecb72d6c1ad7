"""Python values to and from JSON, with their tensors beside it, and without pickle.

[Note: values in JSON] What JSON has is written as it is: None, booleans, strings, lists, dictionaries whose keys are
strings, finite floats, and integers of up to 64 bits. Anything else is an object with one key, which starts with `$`
and says what it is:

| JSON | value |
|---|---|
| `{"$tuple": [1, 2]}`, `$set`, `$frozenset`, `$Size` | these, of lists |
| `{"$dict": [[1, "a"]]}` | a dictionary with keys that are not strings, or that start with `$`; in order |
| `{"$OrderedDict": items}`, `$Counter` | these; `items` is an object, or pairs as above |
| `{"$state_dict": {"items": items, "metadata": {}}}` | an `OrderedDict` with the `_metadata` of `Module.state_dict()` |
| `{"$defaultdict": {"factory": "list", "items": items}}` | with a factory of a short list, or null |
| `{"$deque": {"items": [1], "maxlen": 3}}` | `maxlen` may be null |
| `{"$int": "0x1ff"}`, `{"$float": "nan"}`, `{"$complex": [1.0, 2.0]}` | `"0x7ff8000000000001"`: the bits of a NaN |
| `{"$bytes": "AAE="}`, `$bytearray`, `$str` | base64; `$str` is UTF-8 of a string that has surrogates |
| `{"$dtype": "float32"}`, `{"$device": "cuda:0"}` | of torch |
| `{"$PosixPath": "a/b"}`, `$PurePosixPath`, `$PureWindowsPath` | of pathlib |
| `{"$Namespace": items}`, `$SimpleNamespace` | of argparse and types; `items` as of `$OrderedDict` |
| `{"$enum": {"class": "module:Name", "name": "RED"}}` | a member of an enum |
| `{"$tensor": {"name": "0", "dtype": "float32", "shape": [2]}}` | and `stride` where it is not contiguous |
| `{"$ndarray": {"name": "1", "dtype": "<f8", "shape": [2], "order": "C"}}` | or `"F"` |
| `{"$scalar": {"dtype": "<f8", "value": 0.5}}` | of numpy |
| `{"$shared": {"number": 0, "value": [1, 2]}}`, then `{"$same": 0}` | one object in several locations that can change |

Tensors are stored under the names given there, in the order of their indices, as the safetensors format has them:
complex ones as pairs of reals in a last dimension, elements that the format does not know as bytes in one dimension.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import math
import os
import re
import struct
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Mapping
from pathlib import PurePath
from typing import Any, NoReturn

import torch
from torch.nn.parameter import is_lazy

from swapper.checkpoint.stored_tensors import to_stored
from swapper.checkpoint.value_decoder import (
    DEPTH_MAX,
    FACTORIES,
    NAMESPACES,
    NUMPY_DTYPE,
    NUMPY_TO_TORCH,
    PATHS,
    Walk,
    decode,
    enum_of,
)
from swapper.errors import show
from swapper.tensors.dtypes import dtype_name
from swapper.tensors.strides import contiguous_stride

__all__ = ["DEPTH_MAX", "decode", "encode"]

_CONTAINERS = {
    *(list, tuple, set, frozenset, deque, dict, defaultdict, OrderedDict, Counter),
    *NAMESPACES.values(),
}
_NAN = struct.pack(">d", math.nan)


def encode(value: object, what: str, tensors: dict[str, torch.Tensor], prefix: str) -> Any:
    """A value that strict JSON has for `value`, and its tensors, so that `decode` gives the same value and types back.

    See [Note: values in JSON] for the types; subclasses of them cannot be saved, except `torch.nn.Parameter`: it is
    saved as its values, wherever they are. Keys and elements of sets may be whatever of these is hashable. Of a member
    of an enum the names are saved: its class must be found by them in its module, when it is loaded, too.

    A container, array or tensor that is in two locations is one object afterwards, too. What is not kept: the device,
    `requires_grad` and attributes of a tensor (its strides become those of `clone()`: its own if it is dense), and that
    it shares memory with another. Of memory that is there twice one tensor is stored.

    Write the result with `json.dumps(result, allow_nan=False)` and without `sort_keys`: the order counts.

    Args:
        value: not changed.
        what: what an error calls it, such as "extra".
        tensors: gets what is to be stored: contiguous, on the CPU, without gradient, of element types that safetensors
            has. It shares memory with `value` where it can: whoever writes later copies. Unchanged if this raises.
        prefix: names in `tensors` are this and a number, and none that is there already.

    Raises:
        SwapError: something cannot be saved, is in itself, or is in more than `DEPTH_MAX` others. The message names
            the location, the type, and what to do.
    """
    encoder = _Encoder(what, tensors, prefix)
    data = encoder.whole(value)
    if encoder.again:  # Where each is for the first time is to be said.
        encoder = _Encoder(what, tensors, prefix, encoder.again)
        data = encoder.whole(value)
    tensors.update(encoder.stored)
    return data


class _Encoder(Walk):
    """One call of `encode`.

    Args:
        shared: ids of objects that were found in several locations.

    Attributes:
        stored: what is to be put into the caller's dictionary.
        again: ids of objects that are in several locations.
    """

    def __init__(
        self, what: str, tensors: Mapping[str, torch.Tensor], prefix: str, shared: Container[int] = ()
    ) -> None:
        super().__init__(what)
        self.stored: dict[str, torch.Tensor] = {}
        self.again: set[int] = set()
        self._shared = shared
        self._seen: dict[int, tuple[int, object]] = {}  # By id: numbers, and the objects, so that they stay
        self._others = tensors
        self._prefix = prefix
        self._number = 0
        self._names: dict[object, tuple[str, object]] = {}
        self._open: dict[int, int] = {}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _LEAVES:
            return _LEAVES[kind](value)
        numpy = sys.modules.get("numpy")
        is_array = isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))
        can_change = is_array or (kind in _CONTAINERS and kind not in (tuple, frozenset))
        if not can_change or self._is_hashed():
            return self._one(value)
        if id(value) in self._seen and id(value) not in self._open:
            self.again.add(id(value))
            return {"$same": self._seen[id(value)][0]}
        number = len(self._seen)
        self._seen[id(value)] = number, value
        data = self._one(value)
        return {"$shared": {"number": number, "value": data}} if id(value) in self._shared else data

    def _is_hashed(self) -> bool:
        """True in keys and sets, which have an order of their own."""
        return any(template in ("[key {}]", "[element {}]") for template, _ in self.path)

    def _one(self, value: Any) -> Any:
        kind = type(value)
        if kind in _CONTAINERS:
            return self._container(value)
        if isinstance(value, enum.Enum):
            return self._member(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return self._array(value, numpy)
        if numpy is not None and isinstance(value, numpy.generic):
            return self._scalar(value, numpy)
        return self._refuse(value, _advice_on(value))

    def _member(self, member: enum.Enum) -> Any:
        kind = type(member)
        path = f"{kind.__module__}:{kind.__qualname__}"
        if enum_of(path) is not kind or kind.__members__.get(member.name) is not member:
            return self._refuse(member, _advice_on(member))
        return {"$enum": {"class": path, "name": member.name}}

    def _container(self, value: Any) -> Any:
        if id(value) in self._open:
            raise self.error(f"is {self.location(self._open[id(value)])}, which it is in: save it without the cycle")
        self._open[id(value)] = len(self.path)
        data = self._elements(value)
        del self._open[id(value)]
        return data

    def _elements(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            return self.each("[{}]", self.value, value)
        if kind is tuple:
            return {"$tuple": self.each("[{}]", self.value, value)}
        if kind in (set, frozenset):
            # In an order that is the same in each process: that of a set is by hashes, which are random.
            return {f"${kind.__name__}": sorted(self.each("[element {}]", self.value, value), key=json.dumps)}
        if kind is deque:
            return {"$deque": {"items": self.each("[{}]", self.value, value), "maxlen": value.maxlen}}
        if kind is dict:
            items = self._items(value)
            return items if isinstance(items, dict) else {"$dict": items}
        if kind in NAMESPACES.values():
            return {f"${kind.__name__}": self._items(vars(value))}
        if kind is defaultdict:
            factory = value.default_factory
            name = next((name for name, known in FACTORIES.items() if known is factory), None)
            if name is None and factory is not None:
                raise self.error(f"is a defaultdict whose factory is none of {', '.join(FACTORIES)}: save `dict(x)`")
            return {"$defaultdict": {"factory": name, "items": self._items(value)}}
        attributes = vars(value)
        if kind is OrderedDict and attributes.keys() == {"_metadata"}:
            items = self._items(value)  # First, as they are read.
            metadata = self.within(("._metadata", None), self.value, attributes["_metadata"])
            return {"$state_dict": {"items": items, "metadata": metadata}}
        if attributes:
            raise self.error(f"is of type {_name_of(kind)} with attributes of its own: save `dict(x)`")
        return {f"${kind.__name__}": self._items(value)}

    def _items(self, mapping: Mapping[Any, Any]) -> dict[str, Any] | list[Any]:
        """An object if the keys are strings that are none of ours, else a list of pairs."""
        if all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in mapping):
            return {key: self.within(("[{}]", key), self.value, value) for key, value in mapping.items()}
        keys = self.each("[key {}]", self.value, mapping)
        values = [self.within(("[{}]", key), self.value, value) for key, value in mapping.items()]
        return [[key, value] for key, value in zip(keys, values, strict=True)]

    def _tensor(self, tensor: torch.Tensor) -> Any:
        given = tensor
        if isinstance(tensor, torch.nn.Parameter) and not is_lazy(tensor):
            # One of a class of its own may be on the drive: it comes from there, and its memory is only lent.
            tensor = tensor.detach() if type(tensor) is torch.nn.Parameter else tensor.detach().clone()
        if advice := _advice_on_tensor(tensor):
            return self._refuse(given, advice)
        tensor = tensor.clone() if tensor._is_zerotensor() else tensor.detach()
        storage = tensor.untyped_storage()
        identity = (
            *(tensor.device, storage.data_ptr(), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()),
            *(tensor.is_conj(), tensor.is_neg()),
        )
        data: dict[str, Any] = {
            "name": self._store(identity, tensor, lambda: to_stored(tensor)),
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
        }
        stride = torch.empty_like(tensor, dtype=torch.uint8, device="meta").stride()
        if stride != contiguous_stride(tensor.shape):
            data["stride"] = list(stride)
        return {"$tensor": data}

    def _array(self, array: Any, numpy: Any) -> Any:
        if type(array) is not numpy.ndarray:
            return self._refuse(array, "save `numpy.array(x)`")
        dtype = self._numpy_dtype(array, numpy)

        def stored() -> torch.Tensor:
            values = array if array.flags.carray else array.copy(order="C")
            if dtype in NUMPY_TO_TORCH:
                return to_stored(torch.from_numpy(values))
            # numpy has no bytes of elements that have none.
            return (
                torch.from_numpy(values.reshape(-1).view("|u1"))
                if values.nbytes
                else torch.empty(0, device="cpu").byte()
            )

        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        name = self._store(id(array), array, stored)
        return {"$ndarray": {"name": name, "dtype": dtype, "shape": list(array.shape), "order": order}}

    def _scalar(self, scalar: Any, numpy: Any) -> Any:
        if type(scalar) is numpy.str_:
            return {"$scalar": {"dtype": "str", "value": self.value(str.__str__(scalar))}}
        if type(scalar) is numpy.bytes_:
            return {"$scalar": {"dtype": "bytes", "value": self.value(bytes(scalar))}}
        dtype = self._numpy_dtype(scalar, numpy)
        value: object = scalar.tobytes()
        # A long double is not one of Python's, and a NaN may come back with other bits.
        if scalar.dtype.kind in "biuf" and scalar.dtype.itemsize <= 8:
            number = scalar.item()
            if numpy.array(number, scalar.dtype).tobytes() == value:
                value = number
        return {"$scalar": {"dtype": dtype, "value": self.value(value)}}

    def _numpy_dtype(self, value: Any, numpy: Any) -> str:
        """Text of which numpy makes the element type of `value`."""
        for text in (value.dtype.str, value.dtype.char):
            if NUMPY_DTYPE.fullmatch(text):
                dtype = numpy.dtype(text)
                if dtype == value.dtype and dtype.type is value.dtype.type and dtype.str == value.dtype.str:
                    return str(text)
        return self._refuse(value, f"its dtype is {show(value.dtype)}: save its columns or elements on their own")

    def _store(self, identity: object, source: object, make: Callable[[], torch.Tensor]) -> str:
        """The name under which the tensor is stored that `make` makes.

        Args:
            identity: two of which are equal are of one tensor, while `source`, which is kept, is alive.
        """
        if identity not in self._names:
            while (name := f"{self._prefix}{self._number}") in self._others:
                self._number += 1
            self._number += 1
            self.stored[name] = make()
            self._names[identity] = name, source
        return self._names[identity][0]

    def _refuse(self, value: object, advice: str) -> NoReturn:
        raise self.error(f"is of type {_name_of(type(value))} and cannot be saved: {advice}")


def _int(number: int) -> Any:
    return number if -(2**63) <= number < 2**63 else {"$int": hex(number)}


def _float(number: float) -> Any:
    if math.isfinite(number):
        return number
    if math.isinf(number):
        return {"$float": "inf" if number > 0 else "-inf"}
    bits = struct.pack(">d", number)
    return {"$float": "nan" if bits == _NAN else f"0x{bits.hex()}"}


def _is_unicode(text: str) -> bool:
    """True if it has no surrogates: JSON would join two that are neighbours."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _str(text: str) -> Any:
    return text if _is_unicode(text) else {"$str": _base64(text.encode("utf-8", "surrogatepass"))}


def _path(path: PurePath) -> Any:
    return {f"${type(path).__name__}": _str(str(path))}


_LEAVES: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _int,
    float: _float,
    str: _str,
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"$bytes": _base64(value)},
    bytearray: lambda value: {"$bytearray": _base64(value)},
    torch.dtype: lambda value: {"$dtype": dtype_name(value)},
    torch.device: lambda value: {"$device": str(value)},
    torch.Size: lambda value: {"$Size": list(value)},
    **dict.fromkeys(PATHS.values(), _path),
}
"""Values with nothing in them."""


# --- What to do about values that cannot be saved ---------------------------------------------------------------------


def _name_of(kind: type) -> str:
    """The name by which users call a class."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _advice_on_tensor(tensor: torch.Tensor) -> str:
    """Advice about a tensor that cannot be saved; "" if it can."""
    if type(tensor) is not torch.Tensor:
        return "make it a plain tensor first"
    if tensor.is_nested:
        return "it is a nested tensor: save `x.unbind()`"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}: save `x.to_dense()`, or its parts on their own"
    if tensor.is_quantized:
        return "it is quantised: save `x.int_repr()`, its scale and its zero point"
    return "it is on the meta device, where it has no values" if tensor.is_meta else ""


_CODE = type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType | types.MethodType
_PLAIN = (dict, list, tuple, set, frozenset, deque, str, bytes, bytearray, int, float, complex)


def _advice_on(value: object) -> str:
    """Advice about a value that cannot be saved."""
    kind = type(value)
    if isinstance(value, _CODE):
        return "it is code: leave it out, or save its name as a string and look it up after loading"
    if isinstance(value, enum.Enum):
        return "it is no member by a name, or its class is not found by its own: save its `name` or its `value`"
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return "save `x._asdict()` or `tuple(x)`"
    for method in ("state_dict", "get_state", "getstate"):
        if hasattr(kind, method):
            return f"save `x.{method}()`"
    if hasattr(kind, "bit_generator"):
        return "save `x.bit_generator.state`"
    if dataclasses.is_dataclass(value):
        return "save `dataclasses.asdict(x)`"
    if isinstance(value, os.PathLike):
        return "save `str(x)`"
    plain = next((base.__name__ for base in _PLAIN if isinstance(value, base)), None)
    return (
        f"save `{plain}(x)`" if plain else "save what it is made from: numbers, strings, lists, dictionaries, tensors"
    )
