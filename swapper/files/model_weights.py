"""The tensors of safetensors files for the parameters and buffers of a model, found by their names.

[Note: experts] A model may have fused its experts, one parameter for all of a layer, and a file has them one by one.
The names are those of checkpoints and models on Hugging Face's hub: transformers 5 fuses them when it loads (see its
`conversion_mapping.py`). Only those are here in which the fused parameter is, in memory, the tensors of the files one
after another: of each expert its gate and its projection up, then those of the next expert.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from swapper.errors import ConfigError, SwapError
from swapper.files.own_loading import refuse_own_loading
from swapper.files.packed_tensors import PackedTensor, recipe_of
from swapper.files.tensor_files import StoredTensor, TensorReader
from swapper.files.unread import Step, evaluate, sources_of
from swapper.files.weights import find_weights, misfit
from swapper.tensors.inner import Inner, has_own_class, inner_tensors, is_wrapper

__all__ = ["ModelWeights", "match_weights"]

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class ModelWeights:
    """The tensors of a model that are in files.

    Attributes:
        stored: by parameter or buffer of the model, the tensors that are it one after another in memory: one, or those
            that a fused parameter is made of, or parts of them.
        made: by parameter or buffer, how it is made of tensors of files, where these are not its bytes.
        same_files: returns True if the files have the same tensors at the same places as before.
    """

    stored: Mapping[torch.Tensor, tuple[StoredTensor, ...]]
    made: Mapping[torch.Tensor, Step]
    same_files: Callable[[], bool]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self.stored or tensor in self.made

    def tensors(self) -> list[torch.Tensor]:
        """Give all parameters and buffers that are in files."""
        return [*self.stored, *self.made]

    def paths(self) -> list[Path]:
        """Give the files, each once."""
        sources = [piece for pieces in self.stored.values() for piece in pieces]
        sources += [source for step in self.made.values() for source in sources_of(step)]
        return list(dict.fromkeys(source.path for source in sources))

    def read(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Read the values of some, each into memory of its own, without holes, at a multiple of 64 bytes.

        Raises:
            SwapIOError: a file could not be read.
        """
        with closing(TensorReader()) as reader:
            return [self._read(reader, tensor) for tensor in tensors]

    def _read(self, reader: TensorReader, tensor: torch.Tensor) -> torch.Tensor:
        if tensor in self.made:
            return evaluate(self.made[tensor], reader.read).clone()
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        cursor = 0
        for piece in self.stored[tensor]:  # One after another: only one is in memory besides.
            values.view(-1)[cursor : cursor + piece.shape.numel()].copy_(reader.read(piece).view(-1))
            cursor += piece.shape.numel()
        return values


def match_weights(model: torch.nn.Module, path: str | os.PathLike[str]) -> ModelWeights:
    """Find the tensors of `model`, which may be on the meta device, in the files that `path` names.

    Names, shapes and dtypes must be those of the model's state dict, but for experts, which a file may have one by one
    ([Note: experts]). A tensor with several names there needs to be in the files under one of them; if it is there
    under more the last counts, as in `load_state_dict`.

    Args:
        model: any whose tensors are ordinary, or made of others in memory, as those of torchao. The files have those
            inside under the names of torchao's own files, as `0._weight_qdata`.
        path: as for `swapper.load_safetensors`.

    Raises:
        ConfigError: the model has parameters of bitsandbytes.
        SwapError: they do not fit, or one of the files is broken; the message names file and tensor. Or the model has
            a way of loading a state dict that changes values.
        SwapIOError: a file cannot be read, or is shorter than its header says.
    """
    found = _match(model, path)
    refuse_own_loading(model)
    stored, made = {}, {}
    for tensor, pieces in found.items():
        plain = tuple(piece for piece in pieces if isinstance(piece, StoredTensor))
        if len(plain) == len(pieces):
            stored[tensor] = plain
        else:
            made[tensor] = _joined(tensor, pieces)
    return ModelWeights(stored, made, lambda: _match(model, path) == found)


def _joined(tensor: torch.Tensor, pieces: Sequence[StoredTensor | PackedTensor]) -> Step:
    """Make the step that gives `tensor` of `pieces`, some of them packed: one, or those of its experts in order."""
    recipes = [recipe_of(piece) for piece in pieces]
    if isinstance(one := recipes[0], Step) and len(recipes) == 1:
        return one
    each = len(recipes) // tensor.shape[0]
    row = torch.Size(tensor.shape[1:])
    experts = [recipes[i : i + each] for i in range(0, len(recipes), each)]
    joined = [parts[0] if each == 1 else Step(_ATEN.cat.default, (parts,), {}, row, tensor.dtype) for parts in experts]
    return Step(_ATEN.stack.default, (joined,), {}, tensor.shape, tensor.dtype)


def _match(
    model: torch.nn.Module, path: str | os.PathLike[str]
) -> dict[torch.Tensor, tuple[StoredTensor | PackedTensor, ...]]:
    found = {tensor.name: tensor for tensor in find_weights(path)}
    state: dict[str, object] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and is_wrapper(tensor):  # The files have what is inside.
            state.update((inner.name, inner.tensor) for inner in _inside(name, tensor))
        else:
            state[name] = tensor
    for name, p in model.named_parameters():
        if has_own_class(p):
            raise ConfigError(
                f"weights: {name} is a {type(p).__name__} of bitsandbytes, and files of such come by "
                "swapper.from_pretrained only in this version of swapper; call that, or swapper.offload without weights"
            )
    parameters = dict(inner[:2] for name, p in model.named_parameters() for inner in _inside(name, p))
    own = {id(tensor) for tensor in parameters.values()}
    own.update(id(inner.tensor) for name, buffer in model.named_buffers() for inner in _inside(name, buffer))
    stored: dict[torch.Tensor, tuple[StoredTensor | PackedTensor, ...]] = {}
    missing: list[str] = []
    experts = _ExpertTensors(found)
    used: set[str] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or id(tensor) not in own:
            raise SwapError(
                f"the model's state dict has {name}, which is neither a parameter nor a buffer of it; offload it with "
                "swapper.materialize and swapper.load_safetensors instead of weights"
            )
        if name in found:
            _check_fits(tensor, found[name])
            stored[tensor] = (found[name],)
        elif pieces := experts.of(name, tensor):
            for piece, shape in pieces:
                _check_fits(tensor, piece, shape)
            stored[tensor] = tuple(piece for piece, _ in pieces)
        else:
            missing.append(name)
            continue
        used.update(piece.name for piece in stored[tensor])
    missing = [name for name in missing if state[name] not in stored]
    missing += [name for name, p in parameters.items() if p not in stored and name not in missing]
    unexpected = [tensor for name, tensor in found.items() if name not in state and name not in used]
    if missing or unexpected:
        located = [f"{tensor.name} (in {tensor.path.name})" for tensor in unexpected]
        raise SwapError(f"{misfit(path, missing, located)}; name weights of this model")
    return stored


def _inside(name: str, tensor: torch.Tensor) -> list[Inner]:
    """Return the tensors, as files have them, that `tensor` is made of: itself if it is no wrapper."""
    return list(inner_tensors(name, tensor)) if is_wrapper(tensor) else [Inner(name, tensor)]


def _check_fits(tensor: torch.Tensor, found: StoredTensor | PackedTensor, shape: torch.Size | None = None) -> None:
    """Raise unless `found` is `tensor`, or a part of it that must have `shape`."""
    if torch.nn.parameter.is_lazy(tensor):
        raise SwapError(f"{found.name} is lazy and has no shape yet; run the model once before swapper.offload")
    shape = tensor.shape if shape is None else shape
    if shape != found.shape or tensor.dtype != found.dtype:
        raise SwapError(
            f"{found.path}: tensor {found.name} is {tuple(found.shape)} x {found.dtype}, and in the model it is "
            f"{tuple(shape)} x {tensor.dtype}; make the model with the shapes and dtypes of the files"
        )


# --- Experts ---------------------------------------------------------------------------------------------------------

_PARTS: Mapping[str, Sequence[Sequence[str]]] = {
    "gate_up_proj": (("w1", "w3"), ("gate_proj", "up_proj"), ("fc1", "fc3")),
    "down_proj": (("w2",), ("down_proj",), ("fc2",)),
    "up_proj": (("up_proj",),),
}
"""By name of a fused parameter: the names that an expert's tensors may have, those of one alternative in order."""

_OTHER_NAMES = ((".mlp.", ".block_sparse_moe."), (".mlp.router.", ".block_sparse_moe.gate."))
"""Parts of names in a model, and what Mixtral's and similar checkpoints have in their place."""

_EXPERT = re.compile(r"(.*experts)\.(\d{1,9})\.(\w+)\.weight")


class _ExpertTensors:
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
