"""Lets transformers make the weights that bitsandbytes has quantised from tensors that are not read.

A parameter of bitsandbytes cannot be made of `Unread` tensors: it has memory. So it is made of ordinary ones that are
on its device and have none yet, or nothing but addresses; `Unfilled` knows what each of them is in the files. What is
no tensor of the model, but says what the others mean, is read at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from swapper.errors import SwapError
from swapper.files.tensor_files import parse_json
from swapper.files.unread import Recipe, Unread, read_now, sources_of
from swapper.io.devices import is_accelerator
from swapper.io.host_memory import bytes_of

__all__ = ["Unfilled", "prequantised", "untouched"]

_MODULE = "transformers.integrations.bitsandbytes"


class Unfilled:
    """Tensors that have no values yet, and what each of them is in files.

    Args:
        device: that they are on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[int, tuple[torch.Tensor, Recipe]] = {}

    def stand_in(self, tensor: Unread) -> torch.Tensor:
        """Give an ordinary tensor for `tensor`, without values. Kept until `clear`, so its storage is its own."""
        made = untouched(tensor.like, self._device)
        if tensor.numel():
            self._found[made.untyped_storage()._cdata] = made, tensor.recipe
        return made

    def recipe_of(self, tensor: torch.Tensor) -> Recipe | None:
        """Give what is to be in `tensor`, if it has the storage of a stand-in."""
        if tensor.layout is not torch.strided or not self._found or tensor.device != self._device:
            return None
        found = self._found.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget all of them: from now on the model alone has them."""
        self._found.clear()


def untouched(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make a tensor of the shape, strides and dtype of `like`, whose memory nobody has touched.

    On an accelerator, where that would be taken all the same, its storage has none and a length of 0.
    """
    if is_accelerator(device):
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        made.untyped_storage().resize_(0)
        return made
    # Not by `torch.empty`, which fills it where deterministic algorithms are asked for.
    storage = torch.UntypedStorage(like.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, 0, like.shape, like.stride())


@contextmanager
def prequantised(unfilled: Unfilled, is_here: Callable[[], bool]) -> Iterator[list[Exception]]:
    """Within it what transformers makes of quantised weights that are `Unread` stands in `unfilled`.

    Args:
        unfilled: has what was made.
        is_here: returns True in the thread that this concerns.

    Returns:
        What went wrong. transformers goes on after an error, and raises one of its own at the end.
    """
    wrong: list[Exception] = []
    found = importlib.import_module(_MODULE)
    classes = [(found.Bnb4bitDeserialize, _check_4_bits), (found.Bnb8bitDeserialize, _check_8_bits)]
    plain = {each: each.convert for each, _ in classes}

    def converting(own: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
        def convert(self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            name, model = kwargs.get("full_layer_name") or "", kwargs.get("model")
            if not is_here() or model is None or not _is_quantised(module := model.get_submodule(_module_of(name))):
                return own(self, input_dict, *args, **kwargs)
            given = {key: each[0] if isinstance(each, list) else each for key, each in input_dict.items()}
            try:
                tensors = {key: _stand_in(key, each, unfilled) for key, each in given.items()}
                check(_Weight(name, module, tensors, given))
            except (SwapError, MemoryError, torch.OutOfMemoryError) as error:
                wrong.append(error)
                raise
            return own(self, tensors, *args, **kwargs)

        return convert

    try:
        for each, check in classes:
            each.convert = converting(plain[each], check)
        yield wrong
    finally:
        for each, _ in classes:
            each.convert = plain[each]


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _is_quantised(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("bitsandbytes.")


def _stand_in(key: str, tensor: torch.Tensor, unfilled: Unfilled) -> torch.Tensor:
    if not isinstance(tensor, Unread):
        return tensor
    return read_now(tensor) if ".quant_state." in key else unfilled.stand_in(tensor)


class _Weight:
    """A quantised weight as files have it.

    Args:
        name: in the model.
        module: that it is the weight of.
        tensors: that it is made of, by what their names have after that of the module.
        given: the same, as they came.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> None:
        self.name, self.module, self.tensors = name, module, tensors
        stored = [each for tensor in given.values() if isinstance(tensor, Unread) for each in sources_of(tensor.recipe)]
        self.path = ", ".join(map(str, dict.fromkeys(each.path for each in stored)))

    def require(self, key: str) -> torch.Tensor:
        """Give one of its tensors.

        Raises:
            SwapError: no file has it.
        """
        if key not in self.tensors:
            full = f"{_module_of(self.name)}.{key}".lstrip(".")
            raise SwapError(
                f"{self.path} has some of {self.name}, which is quantised, but no file has {full}; copy or download "
                "the model again"
            )
        return self.tensors[key]

    def refuse(self, what: str) -> SwapError:
        """Make the error that the tensors do not fit together."""
        return SwapError(f"{self.path} does not fit the model: {self.name} {what}; load weights of this model")

    def check(self, key: str, numel: int, dtypes: tuple[torch.dtype, ...]) -> None:
        """Raise SwapError unless one of its tensors is there, and so long."""
        tensor = self.require(key)
        if tensor.numel() != numel or tensor.dtype not in dtypes:
            kinds = " or ".join(map(str, dtypes))
            raise self.refuse(f"has {key} of {tuple(tensor.shape)} x {tensor.dtype} in place of {numel} x {kinds}")

    def shape(self) -> tuple[int, int]:
        """Shape of the matrix in the model."""
        module: Any = self.module
        return module.out_features, module.in_features

    def was_conv1d(self) -> bool:
        """True if it takes the place of a `Conv1D` of transformers, which has its matrix transposed."""
        own: type = vars(self.module).get("source_cls", object)
        return any(each.__name__ == "Conv1D" for each in own.__mro__)


def _check_4_bits(weight: _Weight) -> None:
    said = [key for key in weight.tensors if ".quant_state." in key]
    codes = weight.require("weight")
    if not said:
        weight.require("weight.quant_state.bitsandbytes__nf4")
    try:
        state = parse_json(bytes_of(weight.tensors[said[0]]))
        rows, columns = (int(each) for each in state["shape"])
        block, nested = int(state["blocksize"]), "nested_blocksize" in state
        nested_block = int(state["nested_blocksize"]) if nested else 1
        if min(rows, columns, block, nested_block) < 1:
            raise ValueError("a length is not positive")
        names = [state["dtype"], *([state["nested_dtype"]] if nested else [])]
        if not all(isinstance(getattr(torch, str(each), None), torch.dtype) for each in names):
            raise ValueError(f"{names} are no dtypes")
        if len(said) > 1 or said[0] != f"weight.quant_state.bitsandbytes__{state['quant_type']}":
            raise ValueError(f"they are {said}")
        float(state["nested_offset"] if nested else 0)
    except (ValueError, KeyError, TypeError) as error:
        raise weight.refuse(f"has no quant_state as bitsandbytes writes it ({error!r})") from error
    transposed = weight.shape()[::-1] if weight.was_conv1d() else weight.shape()
    if (rows, columns) not in (weight.shape(), transposed):
        raise weight.refuse(f"is {rows, columns} and in the model {weight.shape()}")
    code_bytes, blocks = -(-rows * columns // 2), -(-rows * columns // block)
    if codes.nbytes != code_bytes:
        raise weight.refuse(f"has {codes.nbytes} bytes of codes in place of {code_bytes}")
    weight.check("weight.absmax", blocks, (torch.uint8,) if nested else (torch.float32,))
    weight.check("weight.quant_map", 16, (torch.float32,))
    if nested:
        weight.check("weight.nested_absmax", -(-blocks // nested_block), (torch.float32,))
        weight.check("weight.nested_quant_map", 256, (torch.float32,))


def _check_8_bits(weight: _Weight) -> None:
    codes = weight.require("weight")
    weight.check("SCB", weight.shape()[0], (torch.float32,))
    weight.check("weight", weight.shape()[0] * weight.shape()[1], (torch.int8,))
    if tuple(codes.shape) != weight.shape():
        raise weight.refuse(f"is {tuple(codes.shape)} and in the model {weight.shape()}")
