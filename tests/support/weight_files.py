"""Weights in safetensors files, as people have them: sharded, in any order, at any offset; models without values."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from swapper.tensors.dtypes import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

__all__ = ["hollow", "state_to_save", "write_shards", "write_weights"]


def state_to_save(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with one name for each tensor, as transformers saves it."""
    state: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        state.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.values()}


def write_weights(path: Path, state: Mapping[str, torch.Tensor], residue: int | None = None) -> Path:
    """Write a safetensors file, its tensors in the order of `state`; the first at `residue` mod 64."""
    table, cursor = {}, 0
    for name, tensor in state.items():
        table[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [cursor, cursor + tensor.nbytes],
        }
        cursor += tensor.nbytes
    header = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
    if residue is not None:
        header += b" " * ((residue - 8 - len(header)) % 64)
    payload = b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in state.values())
    path.write_bytes(struct.pack("<Q", len(header)) + header + payload)
    return path


def write_shards(
    directory: Path, state: Mapping[str, torch.Tensor], chance: random.Random, residues: Sequence[int]
) -> Path:
    """Write `state` in as many files as `residues`, in an order by chance, with an index. Returns that."""
    directory.mkdir(exist_ok=True)
    names = list(state)
    chance.shuffle(names)
    places = {}
    for i, residue in enumerate(residues):
        file = f"model-{i + 1:05d}-of-{len(residues):05d}.safetensors"
        here = names[i :: len(residues)]
        write_weights(directory / file, {name: state[name] for name in here}, residue)
        places |= dict.fromkeys(here, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def hollow(model: nn.Module) -> nn.Module:
    """`model` with its parameters on the meta device, tied ones tied; its buffers keep their values."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                if p not in made:
                    made[p] = nn.Parameter(
                        torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta"), p.requires_grad
                    )
                setattr(module, name, made[p])
    return model
