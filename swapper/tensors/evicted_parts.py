"""Uses of an evicted parameter that need only parts of it, as a layer's experts: each part comes on its own.

[Note: grouped products] On the CPU torch computes a grouped product group by group, each by `mm` into its rows of one
result (ATen, `_grouped_mm_fallback`). The same is done here, so the bits are the same, and of each group that has rows
its part is in memory meanwhile, and no other. So it is on an accelerator for which torch has no kernel of its own: that
takes all groups at once, and may have other bits than `mm`.
"""

from __future__ import annotations

from typing import Any

import torch

from swapper.tensors.attributes import PARTS
from swapper.tensors.evicted_views import EvictedView, ViewOfParameter, parts_of
from swapper.tensors.homes import Call, Parts, home_of

__all__ = ["PARTWISE", "PartwiseView", "answer_by_parts", "multiplies_by_parts"]

PARTWISE = frozenset({"__getitem__", "transpose", "_grouped_mm", "embedding"})
"""Functions that may be answered by parts."""


class PartwiseView(EvictedView):
    """`parameter.transpose(-2, -1)`, whose parts are those of the parameter, transposed."""

    @staticmethod
    def __new__(cls, parameter: torch.nn.Parameter, home: Any) -> PartwiseView:
        """Make one. It has no memory."""
        source = parts_of(ViewOfParameter(parameter, home), lambda like: like.transpose(-2, -1))
        view = EvictedView.__new__(cls, source)
        assert isinstance(view, PartwiseView)
        view.parameter = parameter
        return view

    parameter: torch.nn.Parameter

    @classmethod
    def use(cls, call: Call) -> Any:
        """As for any view; products by parts."""
        if call.name == "_grouped_mm" and (answer := answer_by_parts(call)) is not NotImplemented:
            return answer
        return super().use(call)


def answer_by_parts(call: Call) -> Any:
    """Answer `call`, one of `PARTWISE`, with only those parts of a parameter in memory that it needs.

    Returns:
        `NotImplemented` if it needs the whole, or if its parts do not come one by one.
    """
    if call.name == "_grouped_mm":
        return _grouped_mm(call)
    if call.name == "embedding":
        return _embedded(call)
    parameter = call.first
    if call.kwargs or len(call.args) < 2 or (parts := _parts_of(parameter)) is None:
        return NotImplemented
    if call.name == "transpose":
        home = home_of(parameter)
        dimensions = [d % parameter.dim() if type(d) is int else -1 for d in call.args[1:]]
        swaps_last = sorted(dimensions) == [parameter.dim() - 2, parameter.dim() - 1]
        return PartwiseView(parameter, home) if swaps_last and home is not None else NotImplemented
    return _indexed(parameter, parts, call.args[1])


def _parts_of(item: object, *, in_blocks: bool = False) -> Parts | None:
    """The parts of `item`, if they come one by one, or `in_blocks`, and autograd needs no gradient of it."""
    if not isinstance(item, torch.nn.Parameter):
        return None
    parts: Parts | None = vars(item).get(PARTS)
    if parts is None or home_of(item) is None or (torch.is_grad_enabled() and item.requires_grad):
        return None
    return parts if parts.usable and bool(parts.rows) is in_blocks else None


def _indexed(parameter: torch.nn.Parameter, parts: Parts, index: object) -> Any:
    count = parameter.shape[0]
    wanted: Any = index
    if isinstance(index, torch.Tensor):
        if index.dtype not in (torch.int64, torch.int32) or index.dim() > 1 or index.numel() == 0:
            return NotImplemented
        wanted = index.tolist()
    if type(wanted) is int:
        return parts.part(wanted % count) if -count <= wanted < count else NotImplemented
    if type(wanted) is not list or not all(-count <= each < count for each in wanted):
        return NotImplemented
    rows: dict[int, list[int]] = {}
    for row, each in enumerate(wanted):
        rows.setdefault(each % count, []).append(row)
    gathered = torch.empty((len(wanted), *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    for each in sorted(rows):
        part = parts.part(each)
        for row in rows[each]:
            gathered[row].copy_(part)
        del part  # Else its memory is in use while the next part comes.
    return gathered


def _embedded(call: Call) -> Any:
    """Look rows up; only the blocks that have them come. See [Note: rows] in `parameter.embeddings`."""
    if call.func is not torch.nn.functional.embedding or len(call.args) != 2 or call.kwargs.get("max_norm") is not None:
        return NotImplemented
    ids, weight = call.args
    parts = _parts_of(weight, in_blocks=True)
    if parts is None or type(ids) is not torch.Tensor or ids.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if ids.device.type != "cpu" or torch._C._functorch.peek_interpreter_stack() is not None:
        return NotImplemented
    padding = call.kwargs.get("padding_idx")
    if padding is not None and not -weight.shape[0] <= padding < weight.shape[0]:
        return NotImplemented  # As below.
    wanted = ids.reshape(-1).long()
    if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < weight.shape[0]:
        return NotImplemented  # torch says what is wrong.
    blocks = wanted.div(parts.rows, rounding_mode="floor")
    hit, counts = torch.unique(blocks, return_counts=True)
    found = torch.empty((wanted.numel(), weight.shape[1]), dtype=weight.dtype, device="cpu")
    parts.expect(hit.tolist())
    for block, at in zip(hit.tolist(), torch.split(blocks.argsort(), counts.tolist()), strict=True):
        part = parts.part(block)
        found[at] = part[wanted[at] - block * parts.rows]
        del part  # Else its memory is in use while the next part comes.
    return found.view(*ids.shape, weight.shape[1])


def multiplies_by_parts(device: torch.device) -> bool:
    """True if torch computes a grouped product on `device` by `mm`. See [Note: grouped products]."""
    key = torch._C._dispatch_key_for_device(device.type)
    return not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key)


def _grouped_mm(call: Call) -> Any:
    """See [Note: grouped products]."""
    if len(call.args) != 2 or call.kwargs.get("bias") is not None or call.kwargs.get("out_dtype") is not None:
        return NotImplemented
    rows, weight = call.args
    offsets = call.kwargs.get("offs")
    transposed = isinstance(weight, PartwiseView)
    parts = _parts_of(weight.parameter if transposed else weight)
    if parts is None or type(rows) is not torch.Tensor or rows.dim() != 2 or offsets is None:
        return NotImplemented
    if not multiplies_by_parts(rows.device):
        return NotImplemented
    stops = offsets.tolist()
    if len(stops) != weight.shape[0] or (torch.is_grad_enabled() and rows.requires_grad):
        return NotImplemented
    starts = [0, *stops[:-1]]
    hit = [index for index, (start, stop) in enumerate(zip(starts, stops, strict=True)) if stop > start]
    result: torch.Tensor | None = None
    for index in hit or [0]:
        part = parts.part(index)
        part = part.t() if transposed else part
        if result is None:  # As torch makes it, with its strides: none of its rows is in a group, so none is computed.
            result = call.func(rows, part.unsqueeze(0), offs=torch.zeros_like(offsets[:1]))
        group = slice(starts[index], stops[index])
        torch.mm(rows[group], part, out=result[group])
        del part  # Else its memory is in use while the next part comes.
    return result
