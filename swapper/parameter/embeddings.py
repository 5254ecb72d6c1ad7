"""Embeddings of which the rows that are looked up are read, and no others.

[Note: rows] A token needs one row of an embedding, which is often the longest matrix of a model. So where its weight
stays in a file, blocks of rows are records, as experts are ([Note: experts] in `experts`): those come that have the
rows, and the ones that are used most often stay. A block is a thousandth of the weight, and at least 64 KiB: shorter
ones would save little time, and each takes memory to know it by. What uses the weight in another way, as a head that
is tied to it would, needs it whole in every forward: one that several modules have is no such embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from swapper.parameter.candidates import why_not
from swapper.parameter.conversions import Conversion, has_parts
from swapper.parameter.experts import Found
from swapper.storage.spans import Extent
from swapper.tensors.evicted import is_ordinary

__all__ = ["LEAST_BYTES", "find_embeddings"]

LEAST_BYTES = 4 << 20
"""Of the weight: one that is shorter is read whole, with its neighbours."""

_BLOCKS = 1024
_BLOCK_BYTES = 64 << 10
"""The most blocks of one weight, and the least length of one."""


def find_embeddings(
    model: torch.nn.Module, extents: Mapping[torch.Tensor, Sequence[Extent] | Conversion]
) -> dict[torch.nn.Parameter, Found]:
    """Find the weights of embeddings of `model`, which is on the CPU, whose rows can come in blocks.

    Args:
        extents: of the parameters that are in files.
    """
    owners = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    found: dict[torch.nn.Parameter, Found] = {}
    for prefix, module in model.named_modules():
        weight = module._parameters.get("weight")
        if not isinstance(module, torch.nn.Embedding) or weight is None or module.max_norm is not None:
            continue
        if not has_parts(extents.get(weight)) or owners[weight] > 1 or weight.nbytes < LEAST_BYTES:
            continue
        if weight.dim() == 2 and weight.is_contiguous() and is_ordinary(weight) and not why_not(weight):
            rows = max(-(-weight.shape[0] // _BLOCKS), _BLOCK_BYTES * weight.shape[0] // weight.nbytes, 1)
            found[weight] = Found(f"{prefix}.weight".lstrip("."), module, rows)
    return found
