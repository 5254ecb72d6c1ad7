"""JSON to Python values, with their tensors beside it. See [Note: values in JSON] of `values`."""

from __future__ import annotations

import base64
import enum
import math
import re
import struct
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from swapper.checkpoint.stored_tensors import aligned, from_stored, stored_as, with_stride
from swapper.errors import SwapError, show
from swapper.tensors.dtypes import dtype_name
from swapper.tensors.strides import is_dense_stride

__all__ = [
    *("DEPTH_MAX", "FACTORIES", "NAMESPACES", "NUMPY_DTYPE", "NUMPY_TO_TORCH", "PATHS"),
    *("Decoder", "Walk", "decode", "enum_of"),
]

DEPTH_MAX = 100
"""Depth to which containers may be nested."""

_DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
FACTORIES: dict[str, Callable[[], Any]] = {f.__name__: f for f in (bool, dict, float, int, list, set, str, tuple)}
PATHS: dict[str, type[PurePath]] = {kind.__name__: kind for kind in (type(Path()), PurePosixPath, PureWindowsPath)}
NAMESPACES: dict[str, type] = {kind.__name__: kind for kind in (Namespace, SimpleNamespace)}
NUMPY_DTYPE = re.compile(r"[<>|=][biufcmMSU]\d{1,9}(\[\w{1,20}\])?|[qQ]")
NUMPY_TO_TORCH = {
    "|b1": "bool", "|i1": "int8", "<i2": "int16", "<i4": "int32", "<i8": "int64", "|u1": "uint8", "<f2": "float16",
    "<f4": "float32", "<f8": "float64", "<c8": "complex64", "<c16": "complex128",
}  # fmt: skip
"""Arrays that are stored as numbers; others as bytes."""
_Step = tuple[str, object]


def decode(data: Any, what: str, tensors: Callable[[str], torch.Tensor]) -> Any:
    """The value that `encode` was given. Nothing is executed or imported because `data` says so, except numpy.

    Args:
        data: what `encode` returned, from JSON. Not trusted.
        what: what an error calls it.
        tensors: gives the stored tensor of a name, on the CPU, or raises KeyError; other exceptions pass. What it gives
            may become part of the result, so it is to have memory of its own. Called again for a name that is there
            twice, when it may give the same tensor.

    Returns:
        The value; all tensors on the CPU, without `requires_grad`.

    Raises:
        SwapError: `data` is not what `encode` writes, a stored tensor is missing or another one, a class of an enum is
            not imported yet, or numpy is needed and not installed. The message names the location.
    """
    return Decoder(what, tensors).whole(data)


class Walk:
    """Knows the location in a value that is converted.

    Attributes:
        path: a template and its argument, for each container around it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.path: list[_Step] = []

    def value(self, value: Any) -> Any:
        """Convert one value."""
        raise NotImplementedError

    def whole(self, value: Any) -> Any:
        """Convert the value that everything is in."""
        try:
            return self.value(value)
        except RecursionError as error:
            raise self.error("is too deep for what is left of Python's recursion limit") from error

    def location(self, depth: int | None = None) -> str:
        """As in `extra['schedulers'][0]`. `depth`: of a container that we are in."""
        return self._what + "".join(template.format(show(key)) for template, key in self.path[:depth])

    def error(self, why: str) -> SwapError:
        """An error that begins with the location, and no longer than people read."""
        location = self.location()
        if len(location) > 300:
            location = f"{location[:150]} ... {location[-100:]}"
        return SwapError(f"{location} {why}")

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


def _reader(method: str, kind: type) -> Callable[[Decoder, Any], Any]:
    return lambda decoder, data: getattr(decoder, method)(kind, data)


class Decoder(Walk):
    """One call of `decode`."""

    def __init__(self, what: str, tensors: Callable[[str], torch.Tensor]) -> None:
        super().__init__(what)
        self._tensors = tensors
        self._given: set[str] = set()
        self._objects: dict[int, Any] = {}  # that are in several locations, by number

    def value(self, data: Any) -> Any:
        """Decode one value."""
        kind = type(data)
        if data is None or kind in (bool, int, str):
            return data
        if kind is float and math.isfinite(data):
            return data
        if kind is list:
            return self.each("[{}]", self.value, data)
        self._require(kind is dict, data)
        tag = next((key for key in data if type(key) is str and key.startswith("$")), None)
        if tag is None:
            return self._items(data, {})
        if len(data) != 1:
            raise self.error(f"is malformed: {show(tag)} is not its only key")
        if tag not in self.readers:
            raise self.error(f"is of a kind that this version of swapper does not know: {show(tag)}")
        try:
            return self.readers[tag](self, data[tag])
        except RecursionError:
            raise
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise self.error(f"is malformed: {error}") from error

    def _require(self, fine: bool, data: object) -> None:
        if not fine:
            raise self._malformed(data)

    def _malformed(self, data: object) -> SwapError:
        return self.error(f"is malformed, so that it cannot be read: {show(data)}")

    def _fields(self, data: Any, names: str, optional: str = "") -> list[Any]:
        """The values of an object that has these keys, and no others. None for one that is optional and not there."""
        required, more = names.split(), optional.split()
        self._require(type(data) is dict and set(required) <= data.keys() <= {*required, *more}, data)
        return [data.get(name) for name in (*required, *more)]

    def _list(self, data: Any, template: str = "[{}]") -> list[Any]:
        self._require(type(data) is list, data)
        return self.each(template, self.value, data)

    def _set(self, make: type, data: Any) -> Any:
        elements = self._list(data, "[element {}]")
        result = make(elements)
        if len(result) != len(elements):
            raise self.error("is malformed: two elements are equal")
        return result

    def _items(self, data: Any, into: dict[Any, Any]) -> Any:
        """`into`, filled with the items of an object or a list of pairs."""
        if type(data) is dict:
            self._require(all(type(key) is str and not key.startswith("$") for key in data), data)
            pairs = list(data.items())
        elif type(data) is list and all(type(pair) is list and len(pair) == 2 for pair in data):
            keys = self.each("[key {}]", self.value, [key for key, _ in data])
            pairs = [(key, value) for key, (_, value) in zip(keys, data, strict=True)]
        else:
            raise self._malformed(data)
        for key, value in pairs:
            if key in into:
                raise self.error(f"is malformed: it has the key {show(key)} twice")
            into[key] = self.within(("[{}]", key), self.value, value)
        return into

    def _mapping(self, kind: Callable[[], dict[Any, Any]], data: Any) -> Any:
        return self._items(data, kind())

    def _state_dict(self, data: Any) -> Any:
        items, metadata = self._fields(data, "items metadata")
        result = self._items(items, OrderedDict())
        result._metadata = self.within(("._metadata", None), self.value, metadata)
        return result

    def _defaultdict(self, data: Any) -> Any:
        name, items = self._fields(data, "factory items")
        self._require(name is None or (type(name) is str and name in FACTORIES), data)
        return self._items(items, defaultdict(None if name is None else FACTORIES[name]))

    def _deque(self, data: Any) -> Any:
        items, maxlen = self._fields(data, "items maxlen")
        values = self._list(items)
        self._require(maxlen is None or (type(maxlen) is int and len(values) <= maxlen <= sys.maxsize), data)
        return deque(values, maxlen)

    def _shared(self, data: Any) -> Any:
        number, value = self._fields(data, "number value")
        found = self.value(value)
        self._require(type(number) is int and number not in self._objects, data)
        self._objects[number] = found
        return found

    def _same(self, data: Any) -> Any:
        self._require(type(data) is int and data in self._objects, data)
        return self._objects[data]

    def _int(self, data: Any) -> int:
        self._require(type(data) is str and bool(re.fullmatch("-?0x[0-9a-f]+", data)), data)
        return int(data, 16)

    def _float(self, data: Any) -> float:
        if type(data) is str and data in ("nan", "inf", "-inf"):
            return float(data)
        self._require(type(data) is str and bool(re.fullmatch("0x[0-9a-f]{16}", data)), data)
        (number,) = struct.unpack(">d", bytes.fromhex(data[2:]))
        return float(number)

    def _complex(self, data: Any) -> complex:
        parts = self._list(data)
        self._require(len(parts) == 2 and all(type(part) is float for part in parts), data)
        return complex(*parts)

    def _bytes(self, data: Any) -> bytes:
        self._require(type(data) is str and data.isascii(), data)
        return base64.b64decode(data, validate=True)

    def _str(self, data: Any) -> str:
        return self._bytes(data).decode("utf-8", "surrogatepass")

    def _dtype(self, data: Any) -> torch.dtype:
        if type(data) is not str or data not in _DTYPES:
            raise self.error(f"has an element type that torch {torch.__version__} does not have: {show(data)}")
        return _DTYPES[data]

    def _device(self, data: Any) -> torch.device:
        self._require(type(data) is str, data)
        return torch.device(data)

    def _path(self, kind: Callable[[str], Any], data: Any) -> Any:
        text = self.value(data)
        self._require(type(text) is str, data)
        return kind(text)

    def _namespace(self, kind: Callable[[], Any], data: Any) -> Any:
        result = kind()
        items = self._items(data, {})
        self._require(all(type(key) is str for key in items), data)
        vars(result).update(items)
        return result

    def _member(self, data: Any) -> enum.Enum:
        path, name = self._fields(data, "class name")
        self._require(type(path) is str and type(name) is str, data)
        kind = enum_of(path)
        if kind is None:
            module = path.partition(":")[0]
            how = "load it in the program that has it" if module == "__main__" else f"import {module} before loading"
            raise self.error(f"is of the enum {show(path)}, which is not there: {how}")
        if name not in kind.__members__:
            raise self.error(f"is {show(name)} of the enum {show(path)}, which has no such member")
        return kind.__members__[name]

    def _sizes(self, data: Any) -> list[int]:
        self._require(type(data) is list and all(type(size) is int and 0 <= size < 2**63 for size in data), data)
        return list(data)

    def _stored(self, name: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The stored tensor of a name, which must have these. Has memory that nothing else in the result has."""
        self._require(type(name) is str, name)
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
        self._require(stride is None or is_dense_stride(shape, self._sizes(stride)), data)
        stored = self._stored(name, *stored_as(dtype, shape))
        tensor = from_stored(stored, dtype, shape)
        return tensor if stride is None else with_stride(tensor, stride)

    def _array(self, data: Any) -> Any:
        name, dtype, shape, order = self._fields(data, "name dtype shape order")
        shape = self._sizes(shape)
        self._require(order in ("C", "F"), data)
        numpy = self._numpy()
        element = self._numpy_dtype(dtype, numpy)
        if dtype in NUMPY_TO_TORCH:
            kind = _DTYPES[NUMPY_TO_TORCH[dtype]]
            values = from_stored(self._stored(name, *stored_as(kind, shape)), kind, shape).numpy()
        else:
            stored = self._stored(name, torch.uint8, (math.prod(shape) * element.itemsize,))
            values = numpy.ndarray(shape, element, aligned(stored, 16).numpy())
        return numpy.asfortranarray(values) if order == "F" else values

    def _scalar(self, data: Any) -> Any:
        dtype, value = self._fields(data, "dtype value")
        value = self.value(value)
        numpy = self._numpy()
        if dtype in ("str", "bytes"):
            self._require(type(value) is {"str": str, "bytes": bytes}[dtype], data)
            return numpy.str_(value) if dtype == "str" else numpy.bytes_(value)
        element = self._numpy_dtype(dtype, numpy)
        if type(value) is bytes and len(value) == element.itemsize > 0:
            return numpy.frombuffer(value, element)[0]
        self._require(type(value) is {"b": bool, "i": int, "u": int, "f": float}.get(element.kind), data)
        with numpy.errstate(all="ignore"):
            scalar = numpy.array(value, element)[()]
        self._require(scalar.item() == value or value != value, data)
        return scalar

    def _numpy_dtype(self, data: Any, numpy: Any) -> Any:
        if type(data) is str and NUMPY_DTYPE.fullmatch(data):
            with suppress(TypeError, ValueError):
                return numpy.dtype(data)
        raise self.error(f"has an element type that this numpy does not have: {show(data)}")

    def _numpy(self) -> Any:
        try:
            import numpy
        except ImportError as error:
            raise self.error("is a value of numpy, which is not installed: `pip install numpy`") from error
        return numpy

    readers: ClassVar[dict[str, Callable[[Decoder, Any], Any]]] = {
        "$tuple": lambda self, data: tuple(self._list(data)),
        "$Size": lambda self, data: torch.Size(self._sizes(data)),
        "$bytearray": lambda self, data: bytearray(self._bytes(data)),
        **{f"${kind.__name__}": _reader("_set", kind) for kind in (set, frozenset)},
        **{f"${kind.__name__}": _reader("_mapping", kind) for kind in (dict, OrderedDict, Counter)},
        **{f"${name}": _reader("_path", kind) for name, kind in PATHS.items()},
        **{f"${name}": _reader("_namespace", kind) for name, kind in NAMESPACES.items()},
        "$state_dict": _state_dict,
        "$defaultdict": _defaultdict,
        "$deque": _deque,
        "$shared": _shared,
        "$same": _same,
        "$enum": _member,
        "$int": _int,
        "$float": _float,
        "$complex": _complex,
        "$bytes": _bytes,
        "$str": _str,
        "$dtype": _dtype,
        "$device": _device,
        "$tensor": _tensor,
        "$ndarray": _array,
        "$scalar": _scalar,
    }


def enum_of(path: str) -> type[enum.Enum] | None:
    """The enum by the name `module:Name`, if its module is imported. Nothing is executed to find it."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None
