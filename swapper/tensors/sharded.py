"""DTensors: parameters, gradients and state of which each rank has a part, as FSDP2 and tensor parallelism make them.

The user sees DTensors. Everything that is planned, cut, stepped, stored and summed is the *local* tensor, the part of
this rank: an ordinary tensor, whose elements an elementwise optimizer computes from nothing else. `local_of` is the one
way from the former to the latter, `sharded_like` the way back.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from swapper.errors import ConfigError, SwapError

__all__ = [
    "Box",
    "Sharding",
    "box_of",
    "check_not_flattened",
    "check_sharding",
    "has_norms_of_parts",
    "is_flattened",
    "is_sharded",
    "local_gradient",
    "local_of",
    "local_value",
    "part_name",
    "reshard",
    "sharded_as",
    "sharded_like",
]


def is_sharded(tensor: object) -> bool:
    """True if `tensor` is a DTensor."""
    kind = type(tensor)
    if kind is torch.nn.Parameter or kind is torch.Tensor:  # Nearly all are: a step asks of each several times.
        return False
    # Imports nothing: if the module was not imported there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_flattened(tensor: torch.Tensor) -> bool:
    """True if `tensor` is a parameter of `FullyShardedDataParallel` (FSDP1): a rank's shard, as a plain tensor."""
    return bool(getattr(tensor, "_fsdp_flattened", False))  # As torch.distributed.fsdp._common_utils has it.


def reshard(model: torch.nn.Module) -> None:
    """Have the DTensors of FSDP2 in their places, as `state_dict()` does.

    After a forward without a backward the outermost module, which it does not reshard, has whole tensors there.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and hasattr(fsdp, "FSDPModule"):
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def check_not_flattened(model: torch.nn.Module) -> None:
    """Refuse a model of which parameters belong to FSDP1, which gathers and frees them by itself.

    Raises:
        ConfigError: it is one.
    """
    if name := next((name for name, parameter in model.named_parameters() if is_flattened(parameter)), ""):
        raise ConfigError(
            f"offload_param: swapping cannot work for parameter {name}, which FullyShardedDataParallel (FSDP1) gathers "
            "and frees by itself; use offload_param.device: none, or FSDP2 (fully_shard)"
        )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank has, in the same memory: of a DTensor its local tensor, else `tensor` itself.

    FSDP2 replaces the local tensor when it moves or loads a model, so it is not to be kept.
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def has_norms_of_parts(tensor: torch.Tensor) -> bool:
    """True if torch takes the norm of `tensor` from those that each rank takes of its part, without a collective."""
    known = {"Shard", "Replicate"}
    return not is_sharded(tensor) or all(type(each).__name__ in known for each in tensor.placements)  # type: ignore[attr-defined]


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`local_of` the gradient of `parameter`.

    Raises:
        SwapError: it is not sharded as the parameter is, so that its parts do not belong to each other: see
            `sharded_as`.
    """
    if not is_sharded(parameter):
        return gradient
    if not is_sharded(gradient) or _sharding(gradient) != _sharding(parameter):
        now = f"placements {gradient.placements}" if is_sharded(gradient) else "no placements"  # type: ignore[attr-defined]
        raise SwapError(
            f"a gradient has {now} and its parameter, a DTensor of shape {tuple(parameter.shape)}, has "
            f"{parameter.placements}; bring it to those before step(): "  # type: ignore[attr-defined]
            "p.grad = p.grad.redistribute(p.device_mesh, p.placements)"
        )
    local: Any = local_of(gradient)
    # Of a collective that autograd has started and nobody has waited for yet.
    return local if type(local) is torch.Tensor else local.wait() if hasattr(local, "wait") else local


def sharded_as(tensor: Any, parameter: torch.Tensor) -> Any:
    """`tensor`, a DTensor, with the placements of `parameter`, if no rank needs elements of another for that.

    So it is where `tensor` is replicated and `parameter` sharded: torch's own operations on both take the part there
    too, as of gradients that tensor parallelism replicates. Anything else is returned as it is.
    """
    if not is_sharded(tensor) or not is_sharded(parameter) or _sharding(tensor) == _sharding(parameter):
        return tensor
    now, wanted = tuple(tensor.placements), tuple(parameter.placements)  # type: ignore[attr-defined]
    if tensor.device_mesh != parameter.device_mesh or tensor.shape != parameter.shape:  # type: ignore[attr-defined]
        return tensor
    for have, want in zip(now, wanted, strict=True):
        split_once = wanted.count(want) == 1 and type(want).__name__ == "Shard"
        if have != want and not (type(have).__name__ == "Replicate" and split_once):
            return tensor
    with torch.no_grad():
        return tensor.redistribute(parameter.device_mesh, wanted)  # type: ignore[attr-defined]


def sharded_like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A DTensor of the shape, mesh and placements of `parameter`, of which `local` is the part of this rank.

    Nothing is copied, and `local` stays on its device. Of a `parameter` that is no DTensor it is `local` itself.
    """
    return Sharding.of(parameter).around(local) if is_sharded(parameter) else local


@dataclass(frozen=True)
class Sharding:
    """The mesh, placements and shape that make a DTensor of a local tensor.

    Attributes:
        mesh, placements: the DTensor's.
        shape, stride: of all of it, in elements.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Sharding:
        """Return the sharding of a DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    def covers(self, other: Sharding) -> bool:
        """True if each rank has the same elements of tensors of the one and the other."""
        mine, others = ((each.mesh, each.placements, each.shape) for each in (self, other))
        return mine == others

    def small_part(self) -> tuple[int, ...]:
        """The shape of each rank's part of a small tensor, sharded evenly, whose sizes are in the order of these."""
        sizes = sorted(set(self.shape))
        split = [1] * len(self.shape)
        for placement, ranks in zip(self.placements, self.mesh.shape, strict=True):
            if (dim := getattr(placement, "dim", None)) is not None:
                split[dim] *= ranks
        # Multiples of the number of ranks, so that any dimension can be split among them.
        return tuple(self.mesh.size() * (sizes.index(size) + 2) // n for size, n in zip(self.shape, split, strict=True))

    def over_parts(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor of this mesh and these placements, of whatever shape it is if each rank has `local` of it."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)

    def around(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor of which `local` is the part of this rank; see `sharded_like`."""
        return self.with_local(local.detach())

    def with_local(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor whose local tensor is the object `local`."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        # As FSDP2 makes its own. `DTensor.from_local` would move `local` to the mesh's device, and knows fewer
        # placements.
        spec = DTensorSpec(self.mesh, self.placements, tensor_meta=TensorMeta(self.shape, self.stride, local.dtype))
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


class Box(NamedTuple):
    """The elements of a tensor whose index in each dimension is from an offset on, and of some size."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.sizes)

    def overlaps(self, other: Box) -> bool:
        """True if there is an element in both."""
        return all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True))


def box_of(tensor: Any) -> Box:
    """The elements of `tensor` that this rank has: of a DTensor those of its local tensor, else all.

    Where `_StridedShard` leaves a rank elements that are no box, the boxes of all ranks are not the whole.
    """
    if not is_sharded(tensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(map(int, offsets)), tuple(tensor._local_tensor.shape))


def part_name(name: str, box: Box) -> str:
    """The name in a file of a part of the tensor `name` of a model."""
    return f"{name}@{','.join(map(str, box.offsets))}"


def check_sharding(parameter: torch.Tensor) -> None:
    """Refuse a DTensor of which the local tensor is not a part of the values.

    Raises:
        ConfigError: it has other placements than `Shard` and `Replicate`; or this version of torch keeps it otherwise.
    """
    if not is_sharded(parameter):
        return
    known = {"Shard", "_StridedShard", "Replicate"}  # The second: what `Shard` of FSDP2 after tensor parallelism is.
    others = [each for each in parameter.placements if type(each).__name__ not in known]  # type: ignore[attr-defined]
    if others:
        raise ConfigError(
            f"a parameter is a DTensor of shape {tuple(parameter.shape)} with placement {others[0]!r}; only Shard and "
            "Replicate can be swapped: redistribute it before the optimizer is made"
        )
    if parameter.dim() == 0:
        raise ConfigError("a parameter is a DTensor without dimensions, which cannot be swapped; give it shape (1,)")
    if not hasattr(parameter, "_local_tensor"):
        raise ConfigError(
            f"torch {torch.__version__} keeps the local tensor of a DTensor elsewhere than swapper knows; use another "
            "version of torch"
        )


def _sharding(tensor: Any) -> tuple[object, ...]:
    return tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)


def local_value(value: Any, parameter: torch.Tensor, what: str) -> Any:
    """`value` as this rank keeps it: of a DTensor its local tensor.

    Args:
        value: state of `parameter`; no tensor, or one of any shape.
        what: names it in an error.

    Raises:
        ValueError: it is a DTensor, and neither sharded as `parameter` is nor replicated.
    """
    value = sharded_as(value, parameter)
    if not is_sharded(value):
        return value
    if not is_sharded(parameter) or _sharding(value) != _sharding(parameter):
        has = f"placements {parameter.placements} and shape {tuple(parameter.shape)}"  # type: ignore[attr-defined]
        raise ValueError(
            f"{what} is a DTensor of shape {tuple(value.shape)} with placements {value.placements}, and its parameter "
            f"{'has ' + has if is_sharded(parameter) else 'is a plain tensor'}; no state was loaded. "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict redistributes state"
        )
    return local_of(value)
