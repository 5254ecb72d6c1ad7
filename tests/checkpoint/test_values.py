"""Values through JSON and stored tensors: the same value and the same types, or an error that names the place."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import json
import math
import random
import struct
import subprocess
import sys
import types
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from twins import config_for

import swapper
from swapper.checkpoint import values
from swapper.checkpoint.value_decoder import Decoder
from swapper.errors import SwapError
from swapper.tensors.dtypes import PLAIN_DTYPES

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - {torch.bit}, key=str)
UNQUANTISED = [dtype for dtype in DTYPES if not str(dtype).removeprefix("torch.").startswith(("qint", "quint"))]


def bits_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in the order of their indices, without torch's own copies."""
    storage = bytes(tensor.untyped_storage())
    width = tensor.itemsize
    found = []
    for place in np.ndindex(*tensor.shape):
        begin = (tensor.storage_offset() + sum(i * s for i, s in zip(place, tensor.stride(), strict=True))) * width
        found.append(storage[begin : begin + width])
    return b"".join(found)


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, types and order of dictionaries included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        kinds = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        return kinds and b.device.type == "cpu" and not b.requires_grad and bits_of(a) == bits_of(b)
    if isinstance(a, np.ndarray):
        kinds = (a.dtype, a.shape, a.flags.f_contiguous) == (b.dtype, b.shape, b.flags.f_contiguous)
        return kinds and a.tobytes() == b.tobytes() and bool(b.flags.writeable)
    if isinstance(a, np.str_ | np.bytes_):
        return len(a) == len(b) and bool(a == b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        extras = [(getattr(x, "default_factory", None), getattr(x, "_metadata", None)) for x in (a, b)]
        return (
            extras[0][0] is extras[1][0] and same(extras[0][1], extras[1][1]) and same(list(a.items()), list(b.items()))
        )
    if isinstance(a, set | frozenset):
        left = list(b)
        for item in a:
            found = next((k for k, other in enumerate(left) if same(item, other)), None)
            if found is None:
                return False
            del left[found]
        return not left
    if isinstance(a, list | tuple | deque):
        limits = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return limits and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def through_files(value: Any, what: str = "extra") -> Any:
    """What comes back when the JSON is text and the tensors are a safetensors file."""
    tensors: dict[str, torch.Tensor] = {}
    data = values.encode(value, what, tensors, "extra.")
    for name, tensor in tensors.items():
        assert name.startswith("extra.")
        assert tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.requires_grad
        assert tensor.dtype in PLAIN_DTYPES and not tensor.dtype.is_complex
    text = json.dumps(data, allow_nan=False).encode("ascii")
    # The package refuses tensors that share memory.
    stored = load(save({name: tensor.clone() for name, tensor in tensors.items()}))
    return values.decode(json.loads(text), what, stored.__getitem__)


def plain(value: Any) -> Any:
    """Its JSON, for a value without tensors."""
    tensors: dict[str, torch.Tensor] = {}
    data = values.encode(value, "extra", tensors, "")
    assert not tensors
    return data


def refused(value: Any) -> str:
    """What `encode` says, which leaves no tensor behind."""
    tensors: dict[str, torch.Tensor] = {}
    with pytest.raises(SwapError) as caught:
        values.encode(value, "extra", tensors, "")
    assert not tensors
    return str(caught.value)


def malformed(data: Any, **stored: torch.Tensor) -> str:
    with pytest.raises(SwapError) as caught:
        values.decode(data, "extra", stored.__getitem__)
    return str(caught.value)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits that an element can have."""
    length_bytes = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (length_bytes,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    if dtype == torch.bool:
        data &= 1
    return data.view(dtype).reshape(shape)


# The values.

SCALARS = [
    *(None, False, True, 0, -1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000, -(3**9000)),
    *(0.0, -0.0, 0.1, 5e-324, -2.2250738585072014e-308, 1.7976931348623157e308, 1e22, math.inf, -math.inf, math.nan),
    *(struct.unpack(">d", bytes.fromhex(bits))[0] for bits in ("7ff8000000000001", "fff8000000000000")),
    *(0j, complex(-0.0, 0.0), complex(0.0, -0.0), complex(math.nan, -math.inf), 1.5 + 2j),
    *(
        "",
        "a",
        "$tuple",
        "\0",
        "\u20ac \U0001f600",
        "\ud800",
        "\udc00 \ud83d\ude00",
        "\U0001f600\ude00",
        "\ud83d\\ude00",
    ),
    *(b"", b"\0\xff", bytes(range(256)), bytearray(), bytearray(b"abc")),
    *(torch.float32, torch.complex32, torch.float8_e4m3fn, torch.int4, torch.qint8),
    *(torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 3), torch.device("meta")),
    *(torch.Size(()), torch.Size((2, 0, 3))),
    *(np.float64(0.1), np.float64(-0.0), np.float32(0.1), np.float16(6e-8), np.float32("inf"), np.longdouble("0.1")),
    *(np.int8(-128), np.uint64(2**64 - 1), np.longlong(-5), np.ulonglong(5), np.bool_(True), np.complex64(1 - 0j)),
    *(np.frombuffer(bytes.fromhex("0100c07f"), "<f4")[0], np.frombuffer(bytes.fromhex("0100a07f"), "<f4")[0]),
    *(
        np.str_("a\0\ud800"),
        np.str_(""),
        np.bytes_(b"a\0\xff"),
        np.bytes_(b""),
        np.datetime64("2026-01-01T00:00"),
        np.timedelta64(3, "D"),
    ),
    *(np.datetime64("NaT"), np.timedelta64(5)),
]

CONTAINERS = [
    *([], [1, [2.0, ["a"]]], (), (1,), ((), [()]), {}, {"a": {"b": 1}}, set(), {1, "a", None}, frozenset({1.5, b"x"})),
    *({1: 2, "1": 3}, {None: 1, False: 2, 2.5: 3, 1j: 4, b"k": 5, "s": 6}, {"b": 1, "a": 2}, {math.nan: 1, -0.0: 2}),
    *({"$tuple": [1]}, {"$dict": []}, {"$": 1, "a": 2}, {"a": 1, "$b": 2}, {"\ud800": 1}, {"": 0}, {(1, "a"): 1}),
    *({frozenset({1, 2}): 1}, {torch.float32: 1, torch.device("cpu"): 2, torch.Size((1,)): 3}, {np.int64(5): 1}),
    *(OrderedDict(), OrderedDict(b=1, a=2), OrderedDict({1: 2}), OrderedDict({"$a": 1})),
    *(defaultdict(factory, {"a": 1}) for factory in (None, list, int, float, dict, set, bool, str, tuple)),
    *(defaultdict(list, {1: [2]}), Counter(), Counter("abca"), Counter({4: 2, 2: -1}), Counter({"x": 1.5, "y": None})),
    *(deque(), deque([1, (2,)]), deque([1], maxlen=1), deque(maxlen=0), deque([1, 2], maxlen=5)),
    *({(): []}, [{}], [[]], {"a": None}, [None], {(((1,),),): {(2,)}}),
]


@pytest.mark.parametrize("value", [*SCALARS, *CONTAINERS], ids=lambda value: f"{type(value).__name__}")
def test_values_come_back_with_type_and_bits(value: Any) -> None:
    assert same(through_files(value), value)


hashables = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(st.characters(), max_size=5),
        st.text("$a\ud83d\ude00", max_size=4),
        st.binary(max_size=4),
        st.sampled_from(UNQUANTISED),
        st.integers(-(2**31), 2**31 - 1).map(np.int32),
        st.floats(width=32).map(np.float32),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


@st.composite
def tensors_of_any_kind(draw: st.DrawFn) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    tensor = random_tensor(draw(st.sampled_from(UNQUANTISED)), shape, draw(st.integers(0, 99)))
    return tensor.permute(draw(st.permutations(range(len(shape))))) if shape else tensor


nested = st.recursive(
    hashables | tensors_of_any_kind() | st.binary(max_size=3).map(bytearray),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(deque),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "$tuple", "$tensor", "$b", "b"]), inner, max_size=2),
        st.dictionaries(hashables, inner, max_size=3).map(OrderedDict),
        st.dictionaries(hashables, inner, max_size=3).map(lambda items: defaultdict(list, items)),
        st.sets(hashables, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.long
@settings(deadline=None, max_examples=300)
@given(nested)
def test_any_nested_value_comes_back(value: Any) -> None:
    assert same(through_files(value), value)


def test_the_comparison_of_this_file_sees_differences() -> None:
    different = [0, 0.0, -0.0, False, 0j, "", b"", (), [], None, np.float64(0.0), np.float32(0.0), {}, OrderedDict()]
    different += [torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.tensor([0.0, -0.0]), torch.zeros(1, 2)]
    different += [
        np.zeros(2),
        np.zeros(2, "f4"),
        defaultdict(list),
        defaultdict(int),
        deque(),
        deque(maxlen=1),
        Counter(),
    ]
    different += [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {1, 2}, {1.0, 2}, torch.zeros(2, 2, 2), torch.zeros(2, 2, 2).mT]
    for i, a in enumerate(different):
        assert [k for k, b in enumerate(different) if same(a, b)] == [i]


# What is written.


def test_plain_values_are_plain_json() -> None:
    value = {"epoch": 3, "lr": [0.1, 1e-05], "name": "run", "best": None, "done": False, "nested": {"a": [[], {}]}}
    assert plain(value) == value


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ((1, 2), {"$tuple": [1, 2]}),
        (2**64, {"$int": "0x10000000000000000"}),
        (math.nan, {"$float": "nan"}),
        (-math.inf, {"$float": "-inf"}),
        (b"\0\1", {"$bytes": "AAE="}),
        ({1: "a"}, {"$dict": [[1, "a"]]}),
        ({"$tuple": [1]}, {"$dict": [["$tuple", [1]]]}),
        (OrderedDict(a=1), {"$OrderedDict": {"a": 1}}),
        (Counter({4: 2}), {"$Counter": [[4, 2]]}),
        (defaultdict(dict, a=1), {"$defaultdict": {"factory": "dict", "items": {"a": 1}}}),
        (deque([1], 3), {"$deque": {"items": [1], "maxlen": 3}}),
        (torch.bfloat16, {"$dtype": "bfloat16"}),
        (torch.device("cuda:1"), {"$device": "cuda:1"}),
        (np.float32(0.5), {"$scalar": {"dtype": "<f4", "value": 0.5}}),
    ],
)
def test_what_json_lacks_is_an_object_with_one_key(value: Any, data: Any) -> None:
    assert plain(value) == data


def test_tensors_are_named_by_prefix_and_number_beside_what_is_there() -> None:
    there = torch.zeros(1)
    tensors = {"x.1": there}
    data = values.encode([torch.ones(2), torch.ones(3, dtype=torch.complex64)], "extra", tensors, "x.")
    assert data == [
        {"$tensor": {"name": "x.0", "dtype": "float32", "shape": [2]}},
        {"$tensor": {"name": "x.2", "dtype": "complex64", "shape": [3]}},
    ]
    assert list(tensors) == ["x.1", "x.0", "x.2"] and tensors["x.1"] is there
    assert torch.equal(tensors["x.2"], torch.tensor([[1.0, 0.0]] * 3))


def test_two_calls_with_one_dictionary_do_not_mix() -> None:
    tensors: dict[str, torch.Tensor] = {}
    first = values.encode(torch.ones(2), "a", tensors, "")
    second = values.encode(torch.zeros(2), "b", tensors, "")
    assert torch.equal(values.decode(first, "a", tensors.__getitem__), torch.ones(2))
    assert torch.equal(values.decode(second, "b", tensors.__getitem__), torch.zeros(2))


# Tensors.


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 0, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", UNQUANTISED, ids=str)
def test_tensors_of_every_dtype_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, shape)
    assert same(through_files([tensor]), [tensor])
    turned = tensor.permute(tuple(reversed(range(len(shape)))))
    assert same(through_files([turned]), [turned])


def test_strides_of_dense_tensors_are_kept() -> None:
    for tensor in (
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(3, 5).mT,
        torch.randn(4, 1, 3).as_strided((4, 1, 3), (3, 99, 1)),
        torch.randn(3, 4, 5, dtype=torch.complex128).permute(1, 2, 0),
        torch.empty(2, 0, 3).permute(2, 0, 1),
    ):
        assert same(through_files(tensor), tensor)


def test_strides_of_other_tensors_are_those_of_a_clone() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for tensor in (base[:, ::2], base[1:3, 1:4], base[:1].expand(5, 6), base.mT[::2], base.as_strided((3, 3), (1, 1))):
        assert same(through_files(tensor), tensor.clone())


def test_conjugate_and_negative_views_are_saved_as_what_they_show() -> None:
    base = torch.randn(3, 4, dtype=torch.complex64)
    negative = base.conj().imag
    assert negative.is_neg()
    views = [base, base.conj(), base.imag, negative, base.mT.conj(), torch._efficientzerotensor((2, 3))]
    result = through_files(views)
    assert all(torch.equal(again, view) for again, view in zip(result, views, strict=True))
    assert not any(again.is_conj() or again.is_neg() for again in result)


def test_parameters_are_saved_as_their_values() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    assert same(through_files({"p": parameter}), {"p": parameter.detach()})
    assert same(through_files(parameter * 2), (parameter * 2).detach())


@pytest.mark.long
def test_parameters_on_the_drive_are_saved_as_their_values(nvme_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
    parameters = dict(model.named_parameters())
    expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    model, optimizer = swapper.offload(model, torch.optim.AdamW(model.parameters()), config_for(nvme_path))
    model(torch.randn(2, 128))
    assert any(type(parameter) is not torch.nn.Parameter for parameter in parameters.values())
    assert same(through_files(parameters), expected)
    swapper.of(optimizer).close()


def test_copies_that_are_made_on_the_way_are_not_mixed_up() -> None:
    class Lent(torch.nn.Parameter):
        pass

    expected = [torch.full((9, 100), float(i)).t() for i in range(20)]
    assert same(through_files([Lent(tensor) for tensor in expected]), expected)


def test_memory_that_is_there_twice_is_stored_once_and_comes_back_as_two() -> None:
    tensor = torch.randn(3)
    tensors: dict[str, torch.Tensor] = {}
    value = [tensor, tensor.detach(), tensor.detach(), tensor[:2], tensor.view(torch.int32)]
    data = values.encode(value, "extra", tensors, "")
    assert len(tensors) == 3
    result = values.decode(data, "extra", {name: stored.clone() for name, stored in tensors.items()}.__getitem__)
    assert same(result, value)
    result[0].zero_()
    assert same(result[1:], value[1:])


SHARED = [
    *([1], {"a": 1}, {1: 2}, {1, 2}, deque([1]), OrderedDict(a=1), defaultdict(list), Counter("a"), bytearray(b"a")),
    *(torch.randn(3), torch.randn(2, 3).mT, torch.nn.Parameter(torch.randn(2)), np.arange(3), Namespace(a=1)),
]


@pytest.mark.parametrize("shared", SHARED, ids=lambda value: type(value).__name__)
def test_one_object_in_several_locations_is_one_afterwards(shared: Any) -> None:
    inner = [shared, {"inner": shared}]
    value = {"tuple": (inner, 1), "list": [inner, shared], "own": [copy.deepcopy(shared)], "deque": deque([shared])}
    result = through_files(value)
    first = result["tuple"][0]
    can_be_told = not isinstance(shared, bytearray)
    assert first is result["list"][0]
    for again in (first[1]["inner"], result["list"][1], result["deque"][0]):
        assert (again is first[0]) == can_be_told
    assert result["own"][0] is not first[0]
    result["list"][1] = result["deque"][0] = None
    values_of = torch.Tensor.detach if isinstance(shared, torch.Tensor) else copy.deepcopy
    assert same(first[0], values_of(shared)) and same(result["own"][0], values_of(shared))


def test_tensors_in_keys_and_sets_may_be_elsewhere_too() -> None:
    """Those have an order of their own when they are written."""
    a, b = torch.zeros(2), torch.ones(2)
    result = through_files([{a, b, (a, 1)}, {b: a, (a,): [b]}, a, [b]])
    assert same(result[2:], [a, [b]]) and result[1][next(iter(result[1]))] is result[2]
    assert len(result[0]) == 3


@pytest.mark.parametrize(
    "data",
    [
        *({"$same": 0}, {"$same": "0"}, {"$same": True}, {"$shared": []}, {"$shared": {"number": 0}}),
        *([{"$shared": {"number": 0, "value": []}}, {"$shared": {"number": 0, "value": []}}],),
        {"$shared": {"number": 0, "value": [{"$same": 0}]}},
        {"$shared": {"number": 0, "value": {"$shared": {"number": 0, "value": 1}}}},
        *({"$shared": {"number": "0", "value": 1}}, {"$shared": {"number": 0, "value": 1, "more": 1}}),
    ],
)
def test_damaged_sharing_is_refused(data: Any) -> None:
    with pytest.raises(SwapError, match="malformed"):
        values.decode(data, "extra", {}.__getitem__)


def test_empty_tensors_of_one_shape_are_not_mixed_up() -> None:
    value = [torch.empty(0), torch.empty(0, 2), torch.empty(0, dtype=torch.int64), torch.empty(2, 0)]
    assert same(through_files(value), value)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu_come_back_on_the_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.uint16):
        tensor = random_tensor(dtype, (2, 3, 4, 5))
        assert same(through_files([tensor.cuda().permute(3, 1, 0, 2)]), [tensor.permute(3, 1, 0, 2)])


def test_stored_tensors_at_odd_places_are_read() -> None:
    # A file's tensors may begin anywhere.
    for dtype in (torch.float32, torch.complex64, torch.complex128, torch.complex32, torch.uint64, torch.float8_e5m2):
        tensor = random_tensor(dtype, (3, 2))
        tensors: dict[str, torch.Tensor] = {}
        data = values.encode(tensor.mT, "extra", tensors, "")
        (stored,) = tensors.values()
        longer = torch.empty(stored.numel() + 1, dtype=stored.dtype)
        shifted = longer[1:].view(stored.shape)
        shifted.view(torch.uint8).copy_(stored.view(torch.uint8))
        assert same(values.decode(data, "extra", lambda name, shifted=shifted: shifted), tensor.mT)  # type: ignore[misc]


# numpy.


@pytest.mark.parametrize(
    "array",
    [
        *(np.arange(6, dtype=code).reshape(2, 3) for code in "bBhHiIlLqQefdgFDG"),
        *(np.array(True), np.array([True, False]), np.zeros(0), np.zeros((2, 0)), np.array(1.5), np.arange(6)[::-1]),
        *(
            np.arange(6).reshape(2, 3).T,
            np.asfortranarray(np.ones((2, 3), ">f4")),
            np.arange(24).reshape(2, 3, 4)[:, ::2],
        ),
        *(
            np.broadcast_to(np.arange(3), (2, 3)),
            np.arange(3, dtype=">i8"),
            np.array(["a", "\U0001f600bc"]),
            np.array(""),
        ),
        *(np.array([b"a\0b", b""]), np.array(["2026-01-01", "NaT"], "M8[D]"), np.array([1, 2], "m8[25s]")),
        *(np.frombuffer(b"\1\2\3\4", np.uint8), np.frombuffer(b"xxxxx", np.uint8)[1:].view("<f4")),
        np.array([math.nan, -0.0]),
    ],
    ids=lambda array: f"{array.dtype.str}{array.dtype.char}-{array.shape}",
)
def test_arrays_come_back(array: Any) -> None:
    result = through_files({"a": array})["a"]
    expected = array.copy(order="K" if array.flags.f_contiguous else "C")
    assert same(result, expected) and result.dtype.type is array.dtype.type


@pytest.mark.parametrize(
    "array",
    [
        *(np.array([None]), np.zeros(2, "i4,f4"), np.zeros(2, "V5"), np.ma.zeros(2), np.zeros(2).view(np.recarray)),
        *(np.zeros(2, "i4,f4")[0], np.zeros((2, 2)).view(np.matrix)),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype}",
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_arrays_of_objects_and_records_and_subclasses_are_refused(array: Any) -> None:
    assert "extra['a'] is of type numpy" in refused({"a": array})


@pytest.mark.long
def test_numpy_is_not_imported_for_values_that_have_none_of_it() -> None:
    program = """
import sys
sys.modules["numpy"] = None
from swapper.checkpoint import values
from swapper.checkpoint.value_decoder import Decoder
from swapper.errors import SwapError
tensors = {}
data = values.encode({"a": [1, {"b": (2.5, None)}]}, "extra", tensors, "")
assert values.decode(data, "extra", tensors.__getitem__) == {"a": [1, {"b": (2.5, None)}]}
try:
    values.decode([{"$scalar": {"dtype": "<f8", "value": 0.5}}], "extra", tensors.__getitem__)
except SwapError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout == "extra[0] is a value of numpy, which is not installed: `pip install numpy`\n", done.stderr


# What checkpoints have in them.


def test_random_states_come_back_and_go_on() -> None:
    generator = np.random.default_rng(3)
    torch_generator = torch.Generator().manual_seed(4)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "numpy_dict": np.random.get_state(legacy=False),
        "generator": generator.bit_generator.state,
        "torch": torch.get_rng_state(),
        "torch_generator": torch_generator.get_state(),
    }
    expected = [
        random.random(),
        np.random.rand(),
        generator.random(),
        torch.rand(1),
        torch.rand(1, generator=torch_generator),
    ]
    result = through_files(state)
    assert same(result, state)
    random.setstate(result["python"])
    np.random.set_state(result["numpy"])
    generator.bit_generator.state = result["generator"]
    torch.set_rng_state(result["torch"])
    torch_generator.set_state(result["torch_generator"])
    again = [
        random.random(),
        np.random.rand(),
        generator.random(),
        torch.rand(1),
        torch.rand(1, generator=torch_generator),
    ]
    assert same(again, expected)
    np.random.set_state(result["numpy_dict"])


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_states_of_every_bit_generator_come_back(name: str) -> None:
    generator = np.random.Generator(getattr(np.random, name)(1))
    generator.integers(0, 2**31, dtype=np.uint32)
    state = generator.bit_generator.state
    result = through_files(state)
    assert same(result, state)
    expected = generator.random(5)
    generator.bit_generator.state = result
    assert same(generator.random(5), expected)


class Decay:
    """A callable object, whose attributes a scheduler saves."""

    def __init__(self) -> None:
        self.factors = {1: 0.5, 2: 0.25}
        self.last = (0, 1.0)

    def __call__(self, epoch: int) -> float:
        self.last = (epoch, self.factors.get(epoch, 0.125))
        return self.last[1]


Optimizer = torch.optim.Optimizer
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "LambdaLR of a function": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Decay()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.LambdaLR(o, Decay())], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "CyclicLR of an object": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, scale_fn=Decay()),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "SWALR": lambda o: SWALR(o, 0.05),
    "SWALR, linear": lambda o: SWALR(o, 0.05, anneal_strategy="linear"),
}


def test_every_scheduler_of_torch_is_tested() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.filterwarnings("ignore:.*pass the epoch parameter:UserWarning")
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["", "tensor_lr"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_if_they_had_not_been_saved(name: str, tensor_lr: bool) -> None:
    def run(steps: int, state: Any = None) -> tuple[Any, Any]:
        parameter = torch.nn.Parameter(torch.ones(2))
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.SGD([parameter], lr=lr, momentum=0.9, foreach=False)
        scheduler = SCHEDULERS[name](optimizer)
        if state is not None:
            scheduler.load_state_dict(through_files(state[0]))
            optimizer.load_state_dict(through_files(state[1]))
        for step in range(steps):
            parameter.grad = torch.ones(2)
            optimizer.step()
            scheduler.step(*([1.0 + step % 2] if "Plateau" in name else []))
        return scheduler.state_dict(), optimizer.state_dict()

    halfway = run(4)
    assert same(through_files(halfway), halfway)
    resumed = run(2, halfway)
    if "Plateau" not in name:
        assert (
            resumed[0]["last_epoch" if "Chained" not in name else "_last_lr"]
            == run(6)[0]["last_epoch" if "Chained" not in name else "_last_lr"]
        )
    assert same(resumed, run(2, halfway))


def test_state_dicts_of_scalers_modules_and_optimizers_come_back() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 2, 5, 5)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    result = through_files(value)
    assert same(result, value)
    assert result["model"]._metadata == model.state_dict()._metadata


# What is refused.


class Colour(enum.IntEnum):
    RED = 1


class Mode(str, enum.Enum):
    FAST = "fast"
    QUICK = "fast"  # noqa: PIE796


class Outer:
    class Inner(enum.Flag):
        A = 1
        B = 2


def local_enum() -> type[enum.Enum]:
    class Local(enum.Enum):
        ONE = 1

    return Local


class Point(collections.namedtuple("Point", "x y")):
    pass


@dataclasses.dataclass
class Options:
    x: int = 1


class MyDict(dict[str, int]):
    pass


class MyTensor(torch.Tensor):
    pass


def with_attribute(mapping: Any) -> Any:
    mapping.note = 1
    return mapping


@pytest.mark.parametrize(
    ("value", "kind", "advice"),
    [
        (lambda x: x, "function", "name as a string"),
        (len, "builtin_function_or_method", "name as a string"),
        ([].append, "builtin_function_or_method", "name as a string"),
        (Options, "type", "name as a string"),
        (math, "module", "name as a string"),
        (functools.partial(int), "functools.partial", "what it is made from"),
        (Outer.Inner.A | Outer.Inner.B, "Outer.Inner", "`value`"),
        (local_enum().ONE, "Local", "`value`"),
        (Point(1, 2), "Point", "_asdict()"),
        (Options(), "Options", "dataclasses.asdict"),
        (MyDict(), "MyDict", "`dict(x)`"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear", "x.state_dict()"),
        (torch.Generator(), "torch._C.Generator", "x.get_state()"),
        (random.Random(), "random.Random", "x.getstate()"),
        (np.random.default_rng(), "numpy.random._generator.Generator", "bit_generator.state"),
        (range(3), "range", "what it is made from"),
        (object(), "object", "what it is made from"),
        (torch.zeros(2).to_sparse(), "torch.Tensor", "to_dense()"),
        (torch.zeros(2).to_mkldnn(), "torch.Tensor", "to_dense()"),
        (torch.zeros(2, device="meta"), "torch.Tensor", "meta device"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter", "plain tensor"),
        (torch.zeros(2).as_subclass(MyTensor), "MyTensor", "plain tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_other_types_are_refused_with_place_type_and_advice(value: Any, kind: str, advice: str) -> None:
    message = refused({"schedulers": [{"fn": (0, value)}], "first": torch.ones(2)})
    assert message.startswith("extra['schedulers'][0]['fn'][1] is of type ")
    assert f"{kind} and cannot be saved: " in message and advice in message


@pytest.mark.filterwarnings("ignore")
def test_nested_and_quantised_tensors_are_refused() -> None:
    assert "unbind()" in refused(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
    assert "int_repr()" in refused(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


@pytest.mark.parametrize(
    "value",
    [
        *(
            Path("a/../b"),
            Path(),
            Path("/\udcff"),
            PurePosixPath("x"),
            PureWindowsPath(r"C:\x"),
            {Path("k"): Path()},
        ),
        *(Namespace(), Namespace(a=1, b=Namespace(c=[torch.float16]), **{"$x": 2}), types.SimpleNamespace(a=(1,))),
        *(Colour.RED, Mode.FAST, Mode.QUICK, Outer.Inner.B, {Mode.FAST: Colour.RED}),
    ],
    ids=repr,
)
def test_paths_namespaces_and_members_of_enums_come_back(value: Any) -> None:
    found = through_files([value, value])
    assert found == [value, value] and type(found[0]) is type(value)
    if isinstance(value, enum.Enum):
        assert found[0] is value


def test_a_member_of_an_enum_that_is_not_there_is_refused_and_nothing_is_imported() -> None:
    data = {"$enum": {"class": "antigravity:Mode", "name": "FAST"}}
    assert malformed({"mode": data}).startswith("extra['mode'] is of the enum 'antigravity:Mode', which is not there")
    assert "import antigravity" in malformed(data) and "antigravity" not in sys.modules
    for path in ("os:system", "torch:nn", "builtins:int", f"{__name__}:Mode.FAST", f"{__name__}:", ""):
        assert "which is not there" in malformed({"$enum": {"class": path, "name": "FAST"}})
    assert "no such member" in malformed({"$enum": {"class": f"{__name__}:Mode", "name": "mro"}})


def test_what_is_a_key_or_an_element_is_named_by_its_number() -> None:
    assert refused({"a": {1: 0, Colour.RED + 1: 1, Colour: 2}}).startswith("extra['a'][key 2] is of type ")
    assert refused([{object()}]).startswith("extra[0][element 0] is of type object")


def test_attributes_and_factories_that_would_be_lost_are_refused() -> None:
    assert "attributes" in refused(with_attribute(OrderedDict()))
    assert "attributes" in refused(with_attribute(Counter()))
    assert "factory is none of" in refused([defaultdict(lambda: 1)])


def test_a_cycle_is_refused_and_named() -> None:
    value: dict[str, Any] = {"a": [1]}
    value["a"].append((value["a"],))
    assert refused(value) == "extra['a'][1][0] is extra['a'], which it is in: save it without the cycle"
    value = {}
    value["self"] = value
    assert refused(value).startswith("extra['self'] is extra, ")


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    return value


def test_depth_is_bounded() -> None:
    assert same(through_files(nest(values.DEPTH_MAX)), nest(values.DEPTH_MAX))
    assert "100 deep" in refused(nest(values.DEPTH_MAX + 1))
    assert len(refused(nest(100_000))) < 500
    data: Any = 1
    for _ in range(100_000):
        data = [data]
    assert "100 deep" in malformed(data)
    for _ in range(100_000):
        data = {"$tuple": [data]}
    assert "100 deep" in malformed(data)


def test_what_is_left_of_the_stack_is_enough_or_said() -> None:
    data = plain(nest(values.DEPTH_MAX))

    def deep(frames: int) -> None:
        if frames:
            return deep(frames - 1)
        for call in (lambda: plain(nest(values.DEPTH_MAX)), lambda: values.decode(data, "extra", {}.__getitem__)):
            with pytest.raises(SwapError, match="recursion limit"):
                call()
        return None

    depth_now = len(list(frames_of(sys._getframe())))
    deep(sys.getrecursionlimit() - depth_now - 150)


def frames_of(frame: types.FrameType | None) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back


# What is not trusted.

TWO = {"name": "t", "dtype": "float32", "shape": [2]}
ARRAY = {"name": "t", "dtype": "<f4", "shape": [2], "order": "C"}


@pytest.mark.parametrize(
    "data",
    [
        *(math.nan, math.inf, (1,), b"", {1: 2}, {"$tuple": [], "a": 1}, {"a": 1, "$tuple": []}, {"$unknown": 1}),
        *({"$tuple": 1}, {"$tuple": {}}, {"$set": [[]]}, {"$set": [1, 1]}, {"$set": [1, True]}, {"$frozenset": [{}]}),
        *({"$dict": [[1]]}, {"$dict": [[1, 2, 3]]}, {"$dict": [[[], 1]]}, {"$dict": [[1, 2], [1, 3]]}, {"$dict": 1}),
        *({"$dict": [1]}, {"$dict": {"$a": 1}}, {"$OrderedDict": None}, {"$Counter": [[{}, 1]]}, {"$state_dict": {}}),
        *({"$state_dict": {"items": {}, "metadata": 1, "x": 1}}, {"$state_dict": {"items": 1, "metadata": 1}}),
        *({"$defaultdict": {"factory": "eval", "items": {}}}, {"$defaultdict": {"factory": [], "items": {}}}),
        *({"$defaultdict": {"items": {}}}, {"$deque": {"items": [1, 2], "maxlen": 1}}, {"$deque": {"items": []}}),
        *({"$deque": {"items": [], "maxlen": True}}, {"$deque": {"items": [], "maxlen": 2**70}}),
        *(
            {"$int": 5},
            {"$int": "5"},
            {"$int": "0x"},
            {"$int": "0x5\n"},
            {"$int": "0x_5"},
            {"$float": 1.0},
            {"$float": "1"},
        ),
        *({"$float": "NaN"}, {"$float": "0x7ff"}, {"$complex": [1.0]}, {"$complex": [1, 2]}, {"$complex": "1j"}),
        *({"$bytes": 1}, {"$bytes": "A"}, {"$bytes": "AAE=\n"}, {"$bytes": "\u20ac"}, {"$bytearray": None}),
        *({"$str": "/w=="}, {"$str": 1}, {"$dtype": "nn"}, {"$dtype": 1}, {"$dtype": "Tensor"}, {"$device": "nowhere"}),
        *({"$PosixPath": 1}, {"$PosixPath": {"$bytes": ""}}, {"$Namespace": [[1, 2]]}, {"$SimpleNamespace": 1}),
        *({"$enum": "a:B"}, {"$enum": {"class": 1, "name": "a"}}, {"$enum": {"class": "a:B", "name": 1}}),
        *({"$device": 0}, {"$Size": [1.0]}, {"$Size": [-1]}, {"$Size": [True]}, {"$Size": [2**63]}, {"$Size": 3}),
        *({"$tensor": "t"}, {"$tensor": {}}, {"$tensor": {**TWO, "x": 1}}, {"$tensor": {**TWO, "name": "u"}}),
        *(
            {"$tensor": {**TWO, "name": 1}},
            {"$tensor": {**TWO, "dtype": "float64"}},
            {"$tensor": {**TWO, "shape": [3]}},
        ),
        *(
            {"$tensor": {**TWO, "shape": [2, 1]}},
            {"$tensor": {**TWO, "shape": [-2]}},
            {"$tensor": {**TWO, "stride": []}},
        ),
        *({"$tensor": {**TWO, "stride": [2]}}, {"$tensor": {**TWO, "stride": [0]}}, {"$tensor": {**TWO, "dtype": []}}),
        *({"$tensor": {**TWO, "dtype": "complex64"}}, {"$tensor": {**TWO, "dtype": "uint16", "shape": [4]}}),
        *({"$tensor": {**TWO, "name": "e", "shape": [0, 2**62, 2**62]}}, {"$tensor": {**TWO, "dtype": "qint8"}}),
        *({"$ndarray": {}}, {"$ndarray": {**ARRAY, "dtype": "O"}}, {"$ndarray": {**ARRAY, "dtype": "i4,f4"}}),
        *(
            {"$ndarray": {**ARRAY, "dtype": "<f3"}},
            {"$ndarray": {**ARRAY, "order": "K"}},
            {"$ndarray": {**ARRAY, "dtype": 4}},
        ),
        *(
            {"$ndarray": {**ARRAY, "shape": [3]}},
            {"$ndarray": {**ARRAY, "dtype": ">f4"}},
            {"$ndarray": {**ARRAY, "name": "u"}},
        ),
        *({"$ndarray": {**ARRAY, "dtype": "<M8[nonsense]"}}, {"$ndarray": {**ARRAY, "order": []}}),
        {"$scalar": {"dtype": "<f4", "value": 1e300}},
        *({"$scalar": {"dtype": "<f8", "value": 1}}, {"$scalar": {"dtype": "<f8", "value": "1"}}, {"$scalar": {}}),
        *({"$scalar": {"dtype": "|i1", "value": 300}}, {"$scalar": {"dtype": "|i1", "value": True}}),
        *({"$scalar": {"dtype": "<f8", "value": {"$bytes": "AAE="}}}, {"$scalar": {"dtype": "str", "value": 1}}),
        *({"$scalar": {"dtype": "<U0", "value": {"$bytes": ""}}}, {"$scalar": {"dtype": "O", "value": 1}}),
        *({"$scalar": {"dtype": [], "value": 1}}, {"$scalar": {"dtype": "<M8[s]", "value": 1}}),
    ],
    ids=lambda data: str(data)[:60],
)
def test_malformed_data_is_refused_with_its_place(data: Any) -> None:
    message = malformed({"a": [0, data]}, t=torch.ones(2), e=torch.empty(0))
    assert message.startswith("extra['a'][1]")


FIELDS = ["name", "dtype", "shape", "stride", "order", "value"]
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["t", "float32", "<f4", "C"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*Decoder.readers, "a"]), inner, max_size=1),
        st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, inner)),
        st.fixed_dictionaries({"items": inner}, optional=dict.fromkeys(("metadata", "factory", "maxlen"), inner)),
    ),
    max_leaves=10,
)


@pytest.mark.long
@settings(deadline=None, max_examples=500)
@given(anything)
def test_any_json_gives_a_value_that_can_be_saved_or_an_error(data: Any) -> None:
    tensors = {"t": torch.ones(2)}
    try:
        value = values.decode(data, "extra", tensors.__getitem__)
    except SwapError as error:
        assert str(error).startswith("extra")
    else:
        assert same(through_files(value), value)


def test_errors_of_the_reader_pass() -> None:
    def fails(name: str) -> torch.Tensor:
        raise OSError(name)

    with pytest.raises(OSError, match="t"):
        values.decode({"$tensor": TWO}, "extra", fails)
