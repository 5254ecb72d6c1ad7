"""A summary of what stays in memory of a model whose parameters are swapped, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from swapper.errors import ConfigError
from swapper.parameter.candidates import ALREADY, BUFFER_BYTES, NOT_SAID
from swapper.sizes import format_bytes

__all__ = ["SMALL", "summary_of_what_stays"]

SMALL = "it is small, and read once"
"""The reason why a parameter whose values are in a file of somebody else stays in memory."""

_ADVICE = {
    "it is in no file": "save the model with it",
    "it is lazy": "run the model once before swapper.offload",
    "its class is": "of tensor subclasses only those can be moved that have __tensor_flatten__, as torchao's, and "
    "those of bitsandbytes: quantise the model with one of these, or use ordinary parameters",
    "its dtype is": "convert the model to another dtype, as with model.to(torch.bfloat16)",
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
        if reason not in NOT_SAID and reason != SMALL:
            # What it shares its memory with is in `stays`; here parameters of one kind of reason are one line.
            kind = reason if not reason.startswith("it shares memory with") else "it shares memory with another tensor"
            names_by_reason.setdefault(kind, []).append(name)
    moved_bytes += sum(_length_bytes(tensors[name]) for name, reason in stays.items() if reason in (ALREADY, SMALL))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in tensors}
    buffer_bytes = sum(map(_length_bytes, buffers.values()))
    bytes_of = {
        reason: sum(_length_bytes(tensors[name]) for name in names) for reason, names in names_by_reason.items()
    }
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


def _length_bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_length_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    with contextlib.suppress(NotImplementedError, RuntimeError):  # As of sparse and lazy ones.
        return tensor.nbytes
    return 0


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
