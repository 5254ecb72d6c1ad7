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

Tensors are stored under the names given there, in the order of their indices, as the safetensors format has them:
complex ones as pairs of reals in a last dimension, elements that the format does not know as bytes in one dimension.
"""

from __future__ import annotations

import base64
import binascii
import enum
import math
import re
import struct
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.nn.parameter import is_lazy

from swapper.checkpoint.value_advice import advice_on, advice_on_tensor, name_of
from swapper.checkpoint.value_tensors import aligned, from_stored, is_dense, stored_as, to_stored, with_stride
from swapper.errors import SwapError, show

__all__ = ["DEPTH_MAX", "decode", "encode"]

DEPTH_MAX = 100
"""How many containers may be in one another."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    f.__name__: f for f in (bool, dict, float, int, list, set, str, tuple)
}
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcmMSU]\d{1,9}(\[\w{1,20}\])?|[qQ]")
_NUMPY_TO_TORCH = {
    "|b1": "bool", "|i1": "int8", "<i2": "int16", "<i4": "int32", "<i8": "int64", "|u1": "uint8", "<f2": "float16",
    "<f4": "float32", "<f8": "float64", "<c8": "complex64", "<c16": "complex128",
}  # fmt: skip
"""Arrays that are stored as numbers; others as bytes."""

_NAN = struct.pack(">d", math.nan)

_Step = tuple[str, object]


def encode(value: object, what: str, tensors: dict[str, torch.Tensor], prefix: str) -> Any:
    """A value that strict JSON has for `value`, and its tensors, so that `decode` gives the same value and types back.

    It may be nested, of: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset,
    OrderedDict, defaultdict, Counter, deque, `argparse.Namespace`, `types.SimpleNamespace`, paths of pathlib, members
    of enums, `torch.Size`, `torch.dtype`, `torch.device`; dense tensors of any element type and device; arrays and
    scalars of numpy, but not of objects or records. So random states and the state dicts of schedulers, gradient
    scalers and modules can be saved. Subclasses of these cannot, except `torch.nn.Parameter`: it is saved as its
    values, wherever they are. Keys and elements of sets may be whatever of these is hashable.

    Of a member of an enum the names are saved: its class must be found by them in its module, when it is loaded, too.

    What is not kept: the device, `requires_grad` and attributes of a tensor (its strides become those of `clone()`:
    its own if it is dense), and that two places have one object. A tensor that is there twice is stored once.

    Write the result with `json.dumps(result, allow_nan=False)` and without `sort_keys`: the order counts.

    Args:
        value: not changed.
        what: what an error calls it, such as "extra".
        tensors: what is to be stored is put in here: contiguous, on the CPU, without gradient, of element types that
            safetensors has. It shares memory with `value` where it can: whoever writes later copies. Unchanged if this
            raises.
        prefix: names in `tensors` are this and a number, and none that is there already.

    Raises:
        SwapError: something cannot be saved, is in itself, or is in more than `DEPTH_MAX` others. The message names
            the place, the type, and what to do.
    """
    encoder = _Encoder(what, tensors, prefix)
    try:
        data = encoder.value(value)
    except RecursionError as error:
        raise encoder.error("is too deep for what is left of Python's recursion limit") from error
    tensors.update(encoder.stored)
    return data


def decode(data: Any, what: str, tensors: Callable[[str], torch.Tensor]) -> Any:
    """The value that `encode` was given. Nothing is executed or imported because `data` says so, except numpy. So the
    modules with the classes of enums are imported already.

    Args:
        data: what `encode` returned, from JSON. Not trusted.
        what: what an error calls it.
        tensors: gives the stored tensor of a name, on the CPU, or raises KeyError; other exceptions pass. What it gives
            may become part of the result, so it is to have memory of its own. Called again for a name that is there
            twice, when it may give the same tensor.

    Returns:
        The value; all tensors on the CPU, without `requires_grad`.

    Raises:
        SwapError: `data` is not what `encode` writes, a stored tensor is missing or another one, or numpy is needed and
            not installed. The message names the place.
    """
    decoder = _Decoder(what, tensors)
    try:
        return decoder.value(data)
    except RecursionError as error:
        raise decoder.error("is too deep for what is left of Python's recursion limit") from error


class _Walk:
    """Where in a value we are.

    Attributes:
        path: a template and what goes into it, for each container that we are in.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.path: list[_Step] = []

    def place(self, depth: int | None = None) -> str:
        """As in `extra['schedulers'][0]`. `depth`: of a container that we are in."""
        return self._what + "".join(template.format(show(key)) for template, key in self.path[:depth])

    def error(self, why: str) -> SwapError:
        """An error that begins with the place, and no longer than people read."""
        place = self.place()
        if len(place) > 300:
            place = f"{place[:150]} ... {place[-100:]}"
        return SwapError(f"{place} {why}")

    def within(self, step: _Step, function: Callable[[Any], Any], value: object) -> Any:
        """`function` of a value that is in the one where we are."""
        if len(self.path) >= DEPTH_MAX:
            raise self.error(f"is {DEPTH_MAX} deep, and what is in it would be too deep: flatten it")
        self.path.append(step)
        result = function(value)
        self.path.pop()
        return result

    def each(self, template: str, function: Callable[[Any], Any], values: Iterable[object]) -> list[Any]:
        """`function` of each of the values that are in the one where we are."""
        return [self.within((template, number), function, value) for number, value in enumerate(values)]


class _Encoder(_Walk):
    """One call of `encode`.

    Attributes:
        stored: what is to be put into the caller's dictionary.
    """

    def __init__(self, what: str, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        super().__init__(what)
        self.stored: dict[str, torch.Tensor] = {}
        self._others = tensors
        self._prefix = prefix
        self._number = 0
        self._names: dict[object, tuple[str, object]] = {}
        self._open: dict[int, int] = {}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return _float(value)
        if kind is str:
            return value if _is_unicode(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
        if kind is complex:
            return {"$complex": [_float(value.real), _float(value.imag)]}
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": _base64(value)}
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"$device": str(value)}
        if kind is torch.Size:
            return {"$Size": list(value)}
        if kind in _PATHS.values():
            return {f"${kind.__name__}": self.value(str(value))}
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
        return self._refuse(value, advice_on(value))

    def _member(self, member: enum.Enum) -> Any:
        kind = type(member)
        path = f"{kind.__module__}:{kind.__qualname__}"
        if _enum_of(path) is not kind or kind.__members__.get(member.name) is not member:
            return self._refuse(member, advice_on(member))
        return {"$enum": {"class": path, "name": member.name}}

    def _container(self, value: Any) -> Any:
        if id(value) in self._open:
            raise self.error(f"is {self.place(self._open[id(value)])}, which it is in: save it without the cycle")
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
            return {f"${kind.__name__}": self.each("[element {}]", self.value, value)}
        if kind is deque:
            return {"$deque": {"items": self.each("[{}]", self.value, value), "maxlen": value.maxlen}}
        if kind is dict:
            items = self._items(value)
            return items if isinstance(items, dict) else {"$dict": items}
        if kind in _NAMESPACES.values():
            return {f"${kind.__name__}": self._items(vars(value))}
        if kind is defaultdict:
            factory = value.default_factory
            name = None if factory is None else next((n for n, f in _FACTORIES.items() if f is factory), "")
            if name == "":
                raise self.error(f"is a defaultdict whose factory is none of {', '.join(_FACTORIES)}: save `dict(x)`")
            return {"$defaultdict": {"factory": name, "items": self._items(value)}}
        attributes = vars(value)
        if kind is OrderedDict and attributes.keys() == {"_metadata"}:
            metadata = self.within(("._metadata", None), self.value, attributes["_metadata"])
            return {"$state_dict": {"items": self._items(value), "metadata": metadata}}
        if attributes:
            raise self.error(f"is of type {name_of(kind)} with attributes of its own: save `dict(x)`")
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
        if advice := advice_on_tensor(tensor):
            return self._refuse(given, advice)
        tensor = tensor.clone() if tensor._is_zerotensor() else tensor.detach()
        storage = tensor.untyped_storage()
        identity = (
            *(tensor.device, storage.data_ptr(), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()),
            *(tensor.is_conj(), tensor.is_neg()),
        )
        data: dict[str, Any] = {
            "name": self._store(identity, tensor, lambda: to_stored(tensor)),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
        stride = torch.empty_like(tensor, dtype=torch.uint8, device="meta").stride()
        if stride != torch.empty(tensor.shape, device="meta").stride():
            data["stride"] = list(stride)
        return {"$tensor": data}

    def _array(self, array: Any, numpy: Any) -> Any:
        if type(array) is not numpy.ndarray:
            return self._refuse(array, "save `numpy.array(x)`")
        dtype = self._numpy_dtype(array, numpy)

        def stored() -> torch.Tensor:
            values = array if array.flags.carray else array.copy(order="C")
            if dtype in _NUMPY_TO_TORCH:
                return to_stored(torch.from_numpy(values))
            # numpy has no bytes of elements that have none.
            return torch.from_numpy(values.reshape(-1).view("|u1")) if values.nbytes else torch.empty(0).byte()

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
            if _NUMPY_DTYPE.fullmatch(text):
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
        raise self.error(f"is of type {name_of(type(value))} and cannot be saved: {advice}")


class _Decoder(_Walk):
    """One call of `decode`."""

    def __init__(self, what: str, tensors: Callable[[str], torch.Tensor]) -> None:
        super().__init__(what)
        self._tensors = tensors
        self._given: set[str] = set()
        self._readers: dict[str, Callable[[Any], Any]] = {
            "$tuple": lambda data: tuple(self._list(data)),
            "$set": lambda data: self._set(data, set),
            "$frozenset": lambda data: self._set(data, frozenset),
            "$Size": lambda data: torch.Size(self._sizes(data)),
            "$dict": lambda data: self._items(data, {}),
            "$OrderedDict": lambda data: self._items(data, OrderedDict()),
            "$Counter": lambda data: self._items(data, Counter()),
            "$state_dict": self._state_dict,
            "$defaultdict": self._defaultdict,
            "$deque": self._deque,
            "$int": self._int,
            "$float": self._float,
            "$complex": self._complex,
            "$bytes": self._bytes,
            "$bytearray": lambda data: bytearray(self._bytes(data)),
            "$str": self._str,
            "$dtype": self._dtype,
            "$device": self._device,
            **{f"${name}": partial(self._path, kind) for name, kind in _PATHS.items()},
            **{f"${name}": partial(self._namespace, kind) for name, kind in _NAMESPACES.items()},
            "$enum": self._member,
            "$tensor": self._tensor,
            "$ndarray": self._array,
            "$scalar": self._scalar,
        }

    def value(self, data: Any) -> Any:
        kind = type(data)
        if data is None or kind in (bool, int, str):
            return data
        if kind is float and math.isfinite(data):
            return data
        if kind is list:
            return self.each("[{}]", self.value, data)
        if kind is not dict:
            raise self._malformed(data)
        tag = next((key for key in data if type(key) is str and key.startswith("$")), None)
        if tag is None:
            return self._items(data, {})
        if len(data) != 1:
            raise self.error(f"is malformed: {show(tag)} is not its only key")
        if tag not in self._readers:
            raise self.error(f"is of a kind that this version of swapper does not know: {show(tag)}")
        return self._readers[tag](data[tag])

    def _malformed(self, data: object) -> SwapError:
        return self.error(f"is malformed, so that it cannot be read: {show(data)}")

    def _fields(self, data: Any, names: str, optional: str = "") -> list[Any]:
        """The values of an object that has these keys, and no others. None for one that is optional and not there."""
        required, more = names.split(), optional.split()
        if type(data) is not dict or not set(required) <= data.keys() <= {*required, *more}:
            raise self._malformed(data)
        return [data.get(name) for name in (*required, *more)]

    def _list(self, data: Any, template: str = "[{}]") -> list[Any]:
        if type(data) is not list:
            raise self._malformed(data)
        return self.each(template, self.value, data)

    def _set(self, data: Any, make: type) -> Any:
        elements = self._list(data, "[element {}]")
        try:
            result = make(elements)
        except TypeError as error:
            raise self.error(f"is malformed: {error}") from error
        if len(result) != len(elements):
            raise self.error("is malformed: two elements are equal")
        return result

    def _items(self, data: Any, into: dict[Any, Any]) -> Any:
        """`into`, filled with the items of an object or a list of pairs."""
        if type(data) is dict:
            if not all(type(key) is str and not key.startswith("$") for key in data):
                raise self._malformed(data)
            pairs = list(data.items())
        elif type(data) is list and all(type(pair) is list and len(pair) == 2 for pair in data):
            keys = self.each("[key {}]", self.value, [key for key, _ in data])
            pairs = [(key, value) for key, (_, value) in zip(keys, data, strict=True)]
        else:
            raise self._malformed(data)
        for key, value in pairs:
            try:
                known = key in into
            except TypeError as error:
                raise self.error(f"is malformed: {error}") from error
            if known:
                raise self.error(f"is malformed: it has the key {show(key)} twice")
            into[key] = self.within(("[{}]", key), self.value, value)
        return into

    def _state_dict(self, data: Any) -> Any:
        items, metadata = self._fields(data, "items metadata")
        result = self._items(items, OrderedDict())
        result._metadata = self.within(("._metadata", None), self.value, metadata)
        return result

    def _defaultdict(self, data: Any) -> Any:
        factory, items = self._fields(data, "factory items")
        if factory is not None and (type(factory) is not str or factory not in _FACTORIES):
            raise self._malformed(data)
        return self._items(items, defaultdict(None if factory is None else _FACTORIES[factory]))

    def _deque(self, data: Any) -> Any:
        items, maxlen = self._fields(data, "items maxlen")
        values = self._list(items)
        if maxlen is not None and (type(maxlen) is not int or not len(values) <= maxlen <= sys.maxsize):
            raise self._malformed(data)
        return deque(values, maxlen)

    def _int(self, data: Any) -> int:
        if type(data) is not str or not re.fullmatch("-?0x[0-9a-f]+", data):
            raise self._malformed(data)
        return int(data, 16)

    def _float(self, data: Any) -> float:
        if type(data) is str and data in ("nan", "inf", "-inf"):
            return float(data)
        if type(data) is not str or not re.fullmatch("0x[0-9a-f]{16}", data):
            raise self._malformed(data)
        (number,) = struct.unpack(">d", bytes.fromhex(data[2:]))
        return float(number)

    def _complex(self, data: Any) -> complex:
        parts = self._list(data)
        if len(parts) != 2 or not all(type(part) is float for part in parts):
            raise self._malformed(data)
        return complex(*parts)

    def _bytes(self, data: Any) -> bytes:
        if type(data) is str and data.isascii():
            with suppress(binascii.Error):
                return base64.b64decode(data, validate=True)
        raise self._malformed(data)

    def _str(self, data: Any) -> str:
        try:
            return self._bytes(data).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._malformed(data) from error

    def _dtype(self, data: Any) -> torch.dtype:
        if type(data) is not str or data not in _DTYPES:
            raise self.error(f"has an element type that torch {torch.__version__} does not have: {show(data)}")
        return _DTYPES[data]

    def _device(self, data: Any) -> torch.device:
        if type(data) is str:
            with suppress(RuntimeError):
                return torch.device(data)
        raise self._malformed(data)

    def _path(self, kind: Callable[[str], Any], data: Any) -> Any:
        text = self.value(data)
        if type(text) is not str:
            raise self._malformed(data)
        return kind(text)

    def _namespace(self, kind: Callable[[], Any], data: Any) -> Any:
        result = kind()
        items = self._items(data, {})
        if not all(type(key) is str for key in items):
            raise self._malformed(data)
        vars(result).update(items)
        return result

    def _member(self, data: Any) -> enum.Enum:
        path, name = self._fields(data, "class name")
        if type(path) is not str or type(name) is not str:
            raise self._malformed(data)
        kind = _enum_of(path)
        if kind is None:
            module = path.partition(":")[0]
            how = "load it in the program that has it" if module == "__main__" else f"import {module} before loading"
            raise self.error(f"is of the enum {show(path)}, which is not there: {how}")
        if name not in kind.__members__:
            raise self.error(f"is {show(name)} of the enum {show(path)}, which has no such member")
        return kind.__members__[name]

    def _sizes(self, data: Any) -> list[int]:
        if type(data) is not list or not all(type(size) is int and 0 <= size < 2**63 for size in data):
            raise self._malformed(data)
        return data

    def _stored(self, name: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The stored tensor of a name, which must have these. Has memory that nothing else in the result has."""
        if type(name) is not str:
            raise self._malformed(name)
        try:
            tensor = self._tensors(name)
        except KeyError as error:
            raise self.error(f"has a tensor that is missing: {show(name)}") from error
        if tensor.dtype != dtype or tensor.shape != tuple(shape) or tensor.device.type != "cpu":
            raise self.error(
                f"has the tensor {show(name)}, which should be {dtype} of shape {list(shape)} on the CPU, and is "
                f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
            )
        again = name in self._given
        self._given.add(name)
        return tensor.clone(memory_format=torch.contiguous_format) if again else tensor.contiguous()

    def _tensor(self, data: Any) -> torch.Tensor:
        name, dtype_name, shape, stride = self._fields(data, "name dtype shape", "stride")
        dtype, shape = self._dtype(dtype_name), self._sizes(shape)
        if stride is not None and not is_dense(shape, self._sizes(stride)):
            raise self._malformed(data)
        stored = self._stored(name, *stored_as(dtype, shape))
        try:
            tensor = from_stored(stored, dtype, shape)
            if stride is None:
                return tensor
            result = with_stride(tensor, stride)
        except RuntimeError as error:
            raise self.error(f"is malformed: {error}") from error
        return result

    def _array(self, data: Any) -> Any:
        name, dtype, shape, order = self._fields(data, "name dtype shape order")
        shape = self._sizes(shape)
        if order not in ("C", "F"):
            raise self._malformed(data)
        numpy = self._numpy()
        element = self._numpy_dtype(dtype, numpy)
        try:
            if dtype in _NUMPY_TO_TORCH:
                kind = _DTYPES[_NUMPY_TO_TORCH[dtype]]
                values = from_stored(self._stored(name, *stored_as(kind, shape)), kind, shape).numpy()
            else:
                length_bytes = math.prod(shape) * element.itemsize
                stored = self._stored(name, torch.uint8, (length_bytes,))
                values = numpy.ndarray(shape, element, aligned(stored, 16).numpy())
            return numpy.asfortranarray(values) if order == "F" else values
        except (RuntimeError, ValueError, TypeError) as error:
            raise self.error(f"is malformed: {error}") from error

    def _scalar(self, data: Any) -> Any:
        dtype, value = self._fields(data, "dtype value")
        value = self.value(value)
        numpy = self._numpy()
        if dtype in ("str", "bytes"):
            if type(value) is not {"str": str, "bytes": bytes}[dtype]:
                raise self._malformed(data)
            return numpy.str_(value) if dtype == "str" else numpy.bytes_(value)
        element = self._numpy_dtype(dtype, numpy)
        if type(value) is bytes and len(value) == element.itemsize > 0:
            return numpy.frombuffer(value, element)[0]
        if type(value) is not {"b": bool, "i": int, "u": int, "f": float}.get(element.kind):
            raise self._malformed(data)
        try:
            with numpy.errstate(all="ignore"):
                scalar = numpy.array(value, element)[()]
        except OverflowError as error:
            raise self._malformed(data) from error
        if scalar.item() != value and value == value:
            raise self._malformed(data)
        return scalar

    def _numpy_dtype(self, data: Any, numpy: Any) -> Any:
        if type(data) is str and _NUMPY_DTYPE.fullmatch(data):
            with suppress(TypeError, ValueError):
                return numpy.dtype(data)
        raise self.error(f"has an element type that this numpy does not have: {show(data)}")

    def _numpy(self) -> Any:
        try:
            import numpy
        except ImportError as error:
            raise self.error("is a value of numpy, which is not installed: `pip install numpy`") from error
        return numpy


_PATHS: dict[str, type[PurePath]] = {kind.__name__: kind for kind in (type(Path()), PurePosixPath, PureWindowsPath)}
_NAMESPACES: dict[str, type] = {kind.__name__: kind for kind in (Namespace, SimpleNamespace)}
_CONTAINERS = {
    *(list, tuple, set, frozenset, deque, dict, defaultdict, OrderedDict, Counter),
    *_NAMESPACES.values(),
}


def _enum_of(path: str) -> type[enum.Enum] | None:
    """The enum by the name `module:Name`, if its module is imported. Nothing is executed to find it."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


def _float(number: float) -> Any:
    if math.isfinite(number):
        return number
    if math.isinf(number):
        return {"$float": "inf" if number > 0 else "-inf"}
    bits = struct.pack(">d", number)
    return {"$float": "nan" if bits == _NAN else f"0x{bits.hex()}"}


def _is_unicode(text: str) -> bool:
    """Whether it has no surrogates: JSON would join two that are neighbours."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
