"""Weights that torchao has quantised, in safetensors files: what is broken there is an error with its name.

Neither transformers nor torchao look: they raise at the first token without a name, or compute other values.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from swapper.errors import SwapError
from swapper.files.tensor_files import parse_json, read_header, read_metadata
from swapper.files.unread_models import FilesRead
from swapper.tensors.inner import is_wrapper

__all__ = ["check_fits", "check_parts"]

_ROWS = 256
"""The most rows of the matrix that torchao quantises to try if it can compute."""


def check_parts(files: Sequence[Path]) -> None:
    """Raise SwapError if one of the quantised tensors of a model lacks some of what is inside, by its description.

    torchao writes a description of each tensor into the metadata of the files.
    """
    there = {tensor.name for file in files for tensor in read_header(file)}
    for file in files:
        metadata = read_metadata(file)
        try:
            names = map(str, parse_json(metadata.get("tensor_names", "[]").encode()))
            described = {name: parse_json(metadata[name].encode()) for name in names}
            parts = {name: list(said.get("_tensor_data_names") or ()) for name, said in described.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SwapError(f"{file} has no description of its tensors as torchao writes it ({error!r})") from error
        for name, keys in parts.items():
            prefix, dot, own = name.rpartition(".")
            inside = [f"{prefix}{dot}_{own}_{key}" for key in keys]
            if lacking := [each for each in inside if each not in there]:
                raise SwapError(
                    f"{file} says that {name} is made of {', '.join(lacking)} too, but no file has that; copy or "
                    "download the model again"
                )


def check_fits(path: str, files: FilesRead, model: torch.nn.Module) -> None:
    """Check the quantised matrices of `model`, which came from `path`, but for their values.

    Raises:
        SwapError: one is of another shape than its module says, has scales or zero points for another one, or codes or
            scales of a dtype or shape that torchao cannot compute with. The message says which.
    """
    tried = _Tried(model)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not (isinstance(module, torch.nn.Linear) and isinstance(weight, torch.Tensor) and is_wrapper(weight)):
            continue
        if weight.shape != (module.out_features, module.in_features):
            raise SwapError(
                f"{path} does not fit the model: {name}.weight is {tuple(weight.shape)} and in the model "
                f"{(module.out_features, module.in_features)} (in {files}); load weights of this model"
            )
        _check_blocks(path, files, name, weight)
        if wrong := tried(weight):
            raise SwapError(
                f"{path} does not fit the model: torchao cannot compute with {name}.weight, made of "
                f"{', '.join(f'_weight_{key} {each.dtype} {tuple(each.shape)}' for key, each in _inside(weight))}: "
                f"{wrong} (in {files}); copy or download the model again"
            )


def _check_blocks(path: str, files: FilesRead, name: str, weight: torch.Tensor) -> None:
    if (blocks := _blocks(weight)) is None:
        return
    block: Any = getattr(weight, "block_size", None)
    for key, each in _inside(weight):
        # Their shape is not that of the blocks in all classes and versions of torchao.
        if key in ("scale", "zero_point") and each.numel() != math.prod(blocks):
            raise SwapError(
                f"{path} does not fit the model: {name}._weight_{key} is {tuple(each.shape)}, and {name}.weight has "
                f"{math.prod(blocks)} blocks of {tuple(block)} (in {files}); copy or download the model again"
            )


def _blocks(weight: torch.Tensor) -> tuple[int, ...] | None:
    """The number of blocks in each dimension; None of a class that does not say."""
    block = getattr(weight, "block_size", None)
    if not isinstance(block, (list, tuple)) or len(block) != weight.dim():
        return None
    return tuple(-(-size // max(int(each), 1)) for size, each in zip(weight.shape, block, strict=True))


def _inside(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors inside of one of torchao's, with their names there."""
    for key in weight.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield key, getattr(weight, key)


class _Tried:
    """Tells if torchao can compute with weights like those of a file. It tries a few rows, which torchao has quantised
    itself as the model's config says, and which are given the dtypes and dimensions that the file has.

    Each kind is tried once. A kind counts as right if torchao makes none of its class by that config, or cannot compute
    here with what it has made itself: it may on the device of the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        asked = getattr(getattr(getattr(model, "config", None), "quantization_config", None), "quant_type", None)
        # One for all modules, or one for each name.
        each = (getattr(asked, "fqn_to_config", None) or {"": asked}).values()
        self._asked = [config for config in each if config is not None]
        self._wrong: dict[Any, str] = {}

    def __call__(self, weight: torch.Tensor) -> str:
        """Say what is wrong with all that is made as `weight`; "" if it fits."""
        kind = (type(weight), weight.dtype, weight.shape, _made(weight))
        if kind not in self._wrong:
            found = [_why_not(weight, made) for asked in self._asked if (made := _quantised(weight, asked)) is not None]
            self._wrong[kind] = found[0] if found and all(found) else ""
        return self._wrong[kind]


def _made(weight: torch.Tensor) -> tuple[tuple[str, torch.dtype, int, bool], ...]:
    blocks = _blocks(weight)
    return tuple((key, each.dtype, each.dim(), each.shape == blocks) for key, each in _inside(weight))


def _quantised(weight: torch.Tensor, asked: Any) -> torch.Tensor | None:
    """A few rows of ones that torchao has quantised; None if it cannot here, or makes another class of it."""
    quantization: Any = importlib.import_module("torchao.quantization")
    rows, width = min(_ROWS, weight.shape[0]), weight.shape[1]
    linear = torch.nn.Linear(width, rows, bias=False, device="meta")  # It draws no numbers there.
    linear.weight = torch.nn.Parameter(torch.ones(rows, width, dtype=weight.dtype, device="cpu"), requires_grad=False)
    asked = copy.copy(asked)
    if hasattr(asked, "set_inductor_config"):
        asked.set_inductor_config = False  # It is of the whole process.
    try:
        quantization.quantize_(linear, asked)
        _compute(linear.weight)
    except Exception:
        return None
    return linear.weight if type(linear.weight) is type(weight) else None


def _why_not(weight: torch.Tensor, made: torch.Tensor) -> str:
    """The error of torchao with `made` where the tensors inside are as those of `weight`; "" if there is none."""
    if _made(weight) == _made(made):
        return ""
    inner, like = dict(_inside(made)), dict(_inside(weight))
    try:
        for key in inner.keys() & like.keys():
            there = inner[key].to(like[key].dtype)
            if there.shape == _blocks(made) and like[key].shape != _blocks(weight):
                there = there.t() if like[key].dim() == 2 else there.flatten()
            inner[key] = there
        _, context = made.__tensor_flatten__()  # type: ignore[attr-defined]
        _compute(type(made).__tensor_unflatten__(inner, context, made.shape, made.stride()))  # type: ignore[attr-defined]
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def _compute(weight: torch.Tensor) -> None:
    with torch.no_grad():
        torch.nn.functional.linear(torch.ones(1, weight.shape[1], dtype=weight.dtype, device="cpu"), weight)
