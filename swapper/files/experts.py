"""Experts that a model has fused, one parameter for all of a layer, and a checkpoint has one by one.

The names are those of checkpoints and models on Hugging Face's hub: transformers 5 fuses them when it loads (see its
`conversion_mapping.py`). Only those are here in which the fused parameter is, in memory, the tensors of the files one
after another: of each expert its gate and its projection up, then those of the next expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from swapper.files.packed_tensors import PackedTensor
from swapper.files.tensor_files import StoredTensor

__all__ = ["ExpertTensors"]

_PARTS: Mapping[str, Sequence[Sequence[str]]] = {
    "gate_up_proj": (("w1", "w3"), ("gate_proj", "up_proj"), ("fc1", "fc3")),
    "down_proj": (("w2",), ("down_proj",), ("fc2",)),
    "up_proj": (("up_proj",),),
}
"""By name of a fused parameter: the names that an expert's tensors may have, those of one alternative in order."""

_OTHER_NAMES = ((".mlp.", ".block_sparse_moe."), (".mlp.router.", ".block_sparse_moe.gate."))
"""Parts of names in a model, and what Mixtral's and similar checkpoints have in their place."""

_EXPERT = re.compile(r"(.*experts)\.(\d{1,9})\.(\w+)\.weight")


class ExpertTensors:
    """Finds the tensors of files that are a parameter of a model, where the file does not have its name.

    Args:
        found: the tensors of the files, by name.
    """

    def __init__(self, found: Mapping[str, StoredTensor | PackedTensor]) -> None:
        self._found = found
        self._experts: dict[tuple[str, str], dict[int, StoredTensor | PackedTensor]] = {}
        for name, tensor in found.items():
            if match := _EXPERT.fullmatch(name):
                self._experts.setdefault((match[1], match[3]), {})[int(match[2])] = tensor

    def of(self, name: str, tensor: torch.Tensor) -> list[tuple[StoredTensor | PackedTensor, torch.Size]]:
        """Give the tensors that `tensor`, which the model calls `name`, is made of, in the order of its memory.

        Returns:
            Each with the shape that it must have; none if they are not there, or not all of them.
        """
        if not self._experts:
            return []
        for each in (name, *(name.replace(ours, theirs) for ours, theirs in _OTHER_NAMES if ours in name)):
            if each in self._found:
                return [(self._found[each], tensor.shape)]
            module, _, leaf = each.rpartition(".")
            for parts in _PARTS.get(leaf, ()) if tensor.dim() == 3 else ():
                tables = [self._experts.get((module, part), {}) for part in parts]
                if all(set(table) == set(range(tensor.shape[0])) for table in tables):
                    shape = torch.Size((tensor.shape[1] // len(parts), *tensor.shape[2:]))
                    return [(table[expert], shape) for expert in range(tensor.shape[0]) for table in tables]
        return []
