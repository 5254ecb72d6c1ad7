"""The tensors of a model that may be swapped: parameters, large buffers, and what is inside of tensor subclasses.

And the reasons why others stay in memory, with what a user can do about them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from swapper.errors import ConfigError
from swapper.sizes import format_bytes
from swapper.tensors.collectives import is_distributed
from swapper.tensors.dtypes import NAMES
from swapper.tensors.evicted import is_evicted, is_ordinary
from swapper.tensors.hollow import shows_reads
from swapper.tensors.homes import home_of
from swapper.tensors.inner import has_own_class, inner_tensors, is_wrapper
from swapper.tensors.sharded import is_sharded, local_of
from swapper.tensors.strides import is_dense, is_plain

__all__ = [
    "ALREADY",
    "BUFFER_IN_NO_FILE",
    "SMALL",
    "Candidate",
    "candidates_of",
    "length_bytes",
    "memory_of",
    "modules_with_tensors",
    "names_by_storage",
    "summary_of_what_stays",
    "swapped_tensors",
    "tensors_of",
    "used_by",
    "why_not",
]

BUFFER_BYTES = 64 << 10
"""Buffers of less stay in memory: most of them are changed in every forward, and none is a weight."""

ALREADY = "it is swapped already"
_EMPTY = "it is empty"
BUFFER_IN_NO_FILE = "it is a buffer that is in no file"
_SHORT = "it is a short table of a quantised tensor"
_CAST = "its module, of bitsandbytes, casts it to the dtype of its input"
SMALL = "it is small, and read once"
"""Of a parameter whose values are in a file of somebody else."""
_NOT_SAID = frozenset({ALREADY, _EMPTY, BUFFER_IN_NO_FILE, _SHORT, _CAST, SMALL})
"""Reasons to stay in memory that nobody needs to be told."""

_ADVICE = {
    "it is in no file": "save the model with it",
    "it is lazy": "run the model once before swapper.offload",
    "its class is": "of tensor subclasses only those can be moved that have __tensor_flatten__, as torchao's, and "
    "those of bitsandbytes: quantise the model with one of these, or use ordinary parameters",
    "its dtype is": "convert the model to another dtype, as with model.to(torch.bfloat16)",
    "its layout is": "only dense tensors are moved: make it one (to_dense), if it has few zeros",
    "it was made in inference mode": "make the model outside of torch.inference_mode, and use it there",
    "it is no parameter": "register it as a parameter, or detach it",
    "it shares memory with": "give each memory of its own (clone), or register one parameter under both names",
    "a tensor that is neither": "delete that tensor, or make it a copy (clone), before swapper.offload",
    "it belongs to a ScriptModule": "offload the module that was scripted instead",
    "its elements do not lie densely": "make it contiguous: p.data = p.data.contiguous()",
    "it is computed from others": "register a leaf as the parameter",
    "it is not contiguous": "make it contiguous: p.data = p.data.contiguous()",
}
"""Advice about a parameter that stays, by the beginning of the reason."""

_BY_ROWS, _BY_COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}
"""The methods that give the memory of a tensor, by its layout."""

SHORT_BYTES = 4096
"""Tables of less, beside the codes of a parameter of bitsandbytes, stay in memory: some are shared by a whole model."""


class Candidate(NamedTuple):
    """A tensor that may be swapped.

    Attributes:
        name: in the flat state dict of the model.
        tensor: with memory, or evicted.
        aliases: other tensors that are to have the same values, in the same memory.
        kept: it is in the state dict: False for buffers that are not persistent.
        why_not: the reason why it must stay in memory, as far as its place in the model has one; or "".
        file_name: in the file of its record, if that is another than `name`: of a shard that of a part.
    """

    name: str
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
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if not is_dense(tensor):
        return "its elements do not lie densely in memory"
    if tensor.dtype not in NAMES or tensor.is_quantized:
        return f"its dtype is {tensor.dtype}"
    device = device or tensor.device
    if not shows_reads(tensor.dtype, device):
        return f"its dtype is {tensor.dtype}, which has no NaN to show that it was read on {device.type}"
    if tensor.numel() == 0:
        return _EMPTY
    if tensor.is_inference() and tensor.device.type != "meta":
        return "it was made in inference mode"
    if not tensor.is_leaf:
        return "it is computed from others"
    if not is_parameter and tensor.requires_grad:
        return "it is no parameter, and requires a gradient"
    if not tensor.is_contiguous() and is_distributed():
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
                short = inner.tensor is not parameter and length_bytes(inner.tensor) < SHORT_BYTES
                reason = _SHORT if short and not is_wrapper(parameter) else ""
                reason = _CAST if casts and name == "bias" else reason
                yield Candidate(inner.name, local_of(inner.tensor), inner.aliases, True, reason)
    for name, buffer in module._buffers.items():
        if buffer is None or is_sharded(buffer) or torch.nn.parameter.is_lazy(buffer):
            continue
        kept = name not in module._non_persistent_buffers_set
        for inner in inner_tensors(prefix + name, buffer, module):
            is_large = inner.tensor.layout is torch.strided and inner.tensor.nbytes >= BUFFER_BYTES
            if home_of(inner.tensor) is not None or is_large:
                yield Candidate(inner.name, inner.tensor, inner.aliases, kept)


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
    return (tensor for _, tensor in _named_tensors_of(model))


def _named_tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[torch.Tensor] = set()
    for prefix, module in modules_with_tensors(model):
        for name, whole in (*module._parameters.items(), *module._buffers.items()):
            for inner in () if whole is None else inner_tensors(prefix + name, whole, module):
                if (tensor := local_of(inner.tensor)) not in seen:
                    seen.add(tensor)
                    yield inner.name, tensor


def names_by_storage(model: torch.nn.Module) -> dict[int, list[str]]:
    """The names of the tensors of `model` that are in memory, by `memory_of` them."""
    names: dict[int, list[str]] = {}
    for name, tensor in _named_tensors_of(model):
        if home_of(tensor) is not None or torch.nn.parameter.is_lazy(tensor):  # It shares memory with nothing.
            continue
        if tensor.layout is torch.strided and is_plain(tensor):
            names.setdefault(memory_of(tensor), []).append(name)
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


def summary_of_what_stays(
    model: torch.nn.Module,
    moved_bytes: int,
    stays: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    notable_bytes: int,
) -> str:
    """Say which tensors of `model` stay in memory, why, and what to do; "" if there is nothing to say.

    Args:
        moved_bytes: of the tensors that are planned to move.
        stays: why each of the others stays, by name.
        tensors: all that were looked at, by name.
        notable_bytes: small buffers are said only if they are more together.

    Raises:
        ConfigError: not one byte can be moved, and there are parameters that could if they were others.
    """
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in stays.items():
        if reason not in _NOT_SAID:
            # What it shares its memory with is in `stays`; here parameters of one kind of reason are one line.
            kind = reason if not reason.startswith("it shares memory with") else "it shares memory with another tensor"
            names_by_reason.setdefault(kind, []).append(name)
    moved_bytes += sum(length_bytes(tensors[name]) for name, reason in stays.items() if reason in (ALREADY, SMALL))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in tensors}
    buffer_bytes = sum(map(length_bytes, buffers.values()))
    bytes_of = {reason: sum(length_bytes(tensors[name]) for name in names) for reason, names in names_by_reason.items()}
    kept_bytes = sum(bytes_of.values())
    most = kept_bytes + buffer_bytes > moved_bytes and (names_by_reason or buffer_bytes >= notable_bytes)
    if not names_by_reason and not most:
        return ""
    lines = [
        f"{format_bytes(length)} in {len(names_by_reason[reason])} of {len(tensors)} parameters "
        f"({_some(names_by_reason[reason])}): {reason}; "
        + next(advice for beginning, advice in _ADVICE.items() if reason.startswith(beginning))
        for reason, length in sorted(bytes_of.items(), key=lambda item: -item[1])
    ]
    if most and buffers:
        lines.append(
            f"{format_bytes(buffer_bytes)} in {len(buffers)} buffers ({_some(list(buffers))}): buffers of less than "
            f"{format_bytes(BUFFER_BYTES)} are not swapped; use a model whose weights are parameters"
        )
    total_bytes = moved_bytes + kept_bytes + (buffer_bytes if most else 0)
    text = f"{format_bytes(total_bytes - moved_bytes)} of the {format_bytes(total_bytes)} of this model stay in memory:"
    text = "\n  ".join([text, *lines])
    if names_by_reason and not moved_bytes:
        raise ConfigError(
            "offload_param.device: nvme cannot move a byte of this model's parameters; use offload_param.device: none, "
            f"or change this. {text}"
        )
    return text


def length_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor of any class and layout; 0 of a lazy one."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(length_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    if (parts := _SPARSE.get(tensor.layout)) is not None:  # `nbytes` is not defined, or that of a dense one.
        return sum(getattr(tensor, part)().nbytes for part in parts)
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return tensor.nbytes
    return 0


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
