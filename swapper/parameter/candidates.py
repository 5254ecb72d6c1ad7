"""The tensors of a model that may be swapped: parameters, large buffers, and what is inside of tensor subclasses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from swapper.tensors.dtypes import NAMES
from swapper.tensors.evicted import is_evicted, is_ordinary
from swapper.tensors.hollow import shows_reads
from swapper.tensors.homes import home_of
from swapper.tensors.inner import has_own_class, inner_tensors, is_wrapper
from swapper.tensors.sharded import is_sharded, local_of
from swapper.tensors.strides import is_dense, is_plain

__all__ = [
    "ALREADY",
    "BUFFER_BYTES",
    "BUFFER_IN_NO_FILE",
    "EMPTY",
    "NOT_SAID",
    "SHORT_BYTES",
    "Candidate",
    "candidates_of",
    "memory_of",
    "modules_with_tensors",
    "names_by_storage",
    "swapped_tensors",
    "tensors_of",
    "used_by",
    "why_not",
]

BUFFER_BYTES = 64 << 10
"""Buffers of less stay in memory: most of them are changed in every forward, and none is a weight."""

ALREADY = "it is swapped already"
EMPTY = "it is empty"
BUFFER_IN_NO_FILE = "it is a buffer that is in no file"
_SHORT = "it is a short table of a quantised tensor"
_CAST = "its module, of bitsandbytes, casts it to the dtype of its input"
NOT_SAID = frozenset({ALREADY, EMPTY, BUFFER_IN_NO_FILE, _SHORT, _CAST})
"""Reasons to stay in memory that nobody needs to be told."""

SHORT_BYTES = 4096
"""Tables of less, beside the codes of a parameter of bitsandbytes, stay in memory: some are shared by a whole model."""


class Candidate(NamedTuple):
    """A tensor that may be swapped.

    Attributes:
        name: in the flat state dict of the model.
        of: name of the parameter or buffer that it is, or is inside of.
        tensor: with memory, or evicted.
        aliases: other tensors that are to have the same values, in the same memory.
        kept: it is in the state dict: False for buffers that are not persistent.
        why_not: the reason why it must stay in memory, as far as its place in the model has one; or "".
        file_name: in the file of its record, if that is another than `name`: of a shard that of a part.
    """

    name: str
    of: str
    tensor: torch.Tensor
    aliases: tuple[torch.Tensor, ...] = ()
    kept: bool = True
    why_not: str = ""
    file_name: str = ""


def why_not(tensor: torch.Tensor, device: torch.device | None = None) -> str:
    """Give the reason why `tensor` stays in memory; "" if it can be swapped.

    Args:
        tensor: with memory, evicted, or on the meta device.
        device: that its values are used on; None: its own.
    """
    if (home := home_of(tensor)) is not None:
        return ALREADY if home.temporary is None else ""
    if torch.nn.parameter.is_lazy(tensor):
        return "it is lazy and has no values yet"
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    known = is_ordinary(tensor) or has_own_class(tensor) if is_parameter else type(tensor) is torch.Tensor
    if not known or not is_plain(tensor) or is_evicted(tensor):
        return f"its class is {type(tensor).__name__}"
    if tensor.layout is not torch.strided or not is_dense(tensor):
        return "its elements do not lie densely in memory"
    if tensor.dtype not in NAMES or tensor.is_quantized:
        return f"its dtype is {tensor.dtype}"
    device = device or tensor.device
    if not shows_reads(tensor.dtype, device):
        return f"its dtype is {tensor.dtype}, which has no NaN to show that it was read on {device.type}"
    if tensor.numel() == 0:
        return EMPTY
    if tensor.is_inference() and tensor.device.type != "meta":
        return "it was made in inference mode"
    if not tensor.is_leaf:
        return "it is computed from others"
    if not is_parameter and tensor.requires_grad:
        return "it is no parameter, and requires a gradient"
    if not tensor.is_contiguous() and torch.distributed.is_available() and torch.distributed.is_initialized():
        return (
            "it is not contiguous, and DistributedDataParallel would take its gradient for contiguous while it is away"
        )
    return ""


def modules_with_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that own tensors, with the prefix of their names, in order of registration, each once."""
    for name, module in model.named_modules():
        if any(each is not None for each in (*module._parameters.values(), *module._buffers.values())):
            yield f"{name}." if name else "", module


def candidates_of(prefix: str, module: torch.nn.Module) -> Iterator[Candidate]:
    """Yield the tensors of `module` itself. Small buffers are not among them."""
    weight = next((p for name, p in module._parameters.items() if name == "weight"), None)  # `get` is not scripted.
    casts = weight is not None and has_own_class(weight)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            for inner in inner_tensors(prefix + name, parameter, module):
                short = inner.tensor is not parameter and inner.tensor.nbytes < SHORT_BYTES
                reason = _SHORT if short and not is_wrapper(parameter) else ""
                reason = _CAST if casts and name == "bias" else reason
                yield Candidate(inner.name, prefix + name, local_of(inner.tensor), inner.aliases, True, reason)
    for name, buffer in module._buffers.items():
        if buffer is None or is_sharded(buffer) or torch.nn.parameter.is_lazy(buffer):
            continue
        kept = name not in module._non_persistent_buffers_set
        for inner in inner_tensors(prefix + name, buffer, module):
            if home_of(inner.tensor) is not None or length_bytes(inner.tensor) >= BUFFER_BYTES:
                yield Candidate(inner.name, prefix + name, inner.tensor, inner.aliases, kept, "")


def length_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a strided tensor; 0 of others."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def swapped_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of `model`, and of modules below it, that are swapped, each once."""
    seen: set[torch.Tensor] = set()
    for prefix, module in modules_with_tensors(model):
        for candidate in candidates_of(prefix, module):
            if home_of(candidate.tensor) is not None and candidate.tensor not in seen:
                seen.add(candidate.tensor)
                yield candidate.tensor


def tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield all tensors that have the bytes of the parameters and buffers of `model`, each once."""
    seen: set[torch.Tensor] = set()
    for prefix, module in modules_with_tensors(model):
        for name, whole in (*module._parameters.items(), *module._buffers.items()):
            for inner in () if whole is None else inner_tensors(prefix + name, whole, module):
                if (tensor := local_of(inner.tensor)) not in seen:
                    seen.add(tensor)
                    yield tensor


def names_by_storage(model: torch.nn.Module) -> dict[int, list[str]]:
    """The names of the tensors of `model` that are in memory, by `memory_of` them."""
    names: dict[int, list[str]] = {}
    seen: set[torch.Tensor] = set()
    for prefix, module in modules_with_tensors(model):
        for name, whole in (*module._parameters.items(), *module._buffers.items()):
            if whole is None or whole in seen:
                continue
            seen.add(whole)
            for inner in inner_tensors(prefix + name, whole, module):
                tensor = local_of(inner.tensor)
                if home_of(tensor) is not None or torch.nn.parameter.is_lazy(tensor):  # It shares memory with nothing.
                    continue
                if tensor.layout is torch.strided and is_plain(tensor) and (tensor is whole or tensor not in seen):
                    seen.add(tensor)
                    names.setdefault(memory_of(tensor), []).append(inner.name)
    return names


def memory_of(tensor: torch.Tensor) -> int:
    """Tell memory apart: the address of what `tensor` is in, or of the storage itself where that has no memory yet."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata


def used_by(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that the forward of `module` itself uses, as far as can be known before it runs."""
    whole = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    # These choose another kernel in evaluation if a parameter of a module below them is not an ordinary one.
    for part in module.modules() if isinstance(module, whole) else (module,):
        yield from (candidate.tensor for candidate in candidates_of("", part))
    if isinstance(module, torch.nn.TransformerEncoder) and len(module.layers):
        for part in module.layers[0].modules():  # As does this, by those of its first layer alone.
            yield from (candidate.tensor for candidate in candidates_of("", part))
