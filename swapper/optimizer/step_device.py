"""The device on which the buckets of an optimizer are stepped: the one of the parameters, or the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError
from swapper.io.devices import free_bytes, is_accelerator
from swapper.optimizer.device_slots import SLOTS
from swapper.process.warnings import warn_once
from swapper.sizes import format_bytes

__all__ = ["device_of", "has_room", "may_step_on_device", "step_bytes", "warn_of_for_loop"]

log = logging.getLogger(__name__)


def device_of(parameters: Iterable[torch.Tensor]) -> torch.device:
    """The device that all of `parameters` are on; the CPU if there are none.

    Raises:
        ConfigError: they are on several, or on one that swapper does not know.
    """
    devices = {p.device for p in parameters}
    if not devices:
        return torch.device("cpu")
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise ConfigError(f"the parameters are on several devices ({names}); give each device an optimizer of its own")
    device = devices.pop()
    if not is_accelerator(device) and device.type not in ("cpu", "meta"):
        raise ConfigError(f"the parameters are on {device}; swapper knows the CPU and torch's accelerators")
    return device


def may_step_on_device(asked: str, device: torch.device, encodes: bool = False) -> bool:
    """True if buckets are to be stepped on `device`, that of the parameters, if it has room.

    Args:
        asked: `offload_optimizer.step_device`.
        encodes: some state is encoded, which is done on the CPU only.

    Raises:
        ConfigError: that is "device", and the parameters are on no accelerator.
    """
    if asked == "device" and not is_accelerator(device) and device.type != "meta":
        raise ConfigError(
            "offload_optimizer.step_device: device steps parameters on the accelerator that they are on, and these are "
            f"on {device}; use auto or cpu"
        )
    if encodes and asked == "auto" and is_accelerator(device):
        log.warning("steps are made on the CPU, with its bits, because offload_optimizer.encoding is for those only")
    return asked != "cpu" and is_accelerator(device) and not encodes


def step_bytes(slot_bytes: int, scratch_bytes: int) -> int:
    """Device memory that steps take, at most. Arguments as for `has_room`."""
    # As much again as a record: state that the class makes in its first step, and what it computes in between.
    return (SLOTS + 1) * slot_bytes + scratch_bytes


def has_room(device: torch.device, slot_bytes: int, scratch_bytes: int) -> bool:
    """True if steps on `device` have room now. Logs where the steps are made.

    Args:
        slot_bytes: of each slot.
        scratch_bytes: what decoded masters and fp32 gradients of a bucket take.
    """
    needed_bytes = step_bytes(slot_bytes, scratch_bytes)
    there_bytes = free_bytes(device)
    if there_bytes is not None and needed_bytes <= there_bytes:
        log.info("steps are made on %s, with up to %s of its memory", device, format_bytes(needed_bytes))
        return True
    free = "an unknown part of its memory is" if there_bytes is None else f"{format_bytes(there_bytes)} are"
    log.warning(
        "steps are made on the CPU, with its bits: on %s they need %s, and %s free; a smaller bucket_bytes needs less, "
        "and offload_optimizer.step_device: device or cpu says where to step whatever is free",
        device,
        format_bytes(needed_bytes),
        free,
    )
    return False


def warn_of_for_loop(optimizer: Optimizer) -> None:
    """Say that a class that steps parameters of an accelerator while they are evicted may have other bits then.

    torch asks for ordinary parameters before it takes `foreach=None` for True. To give it that would need all of them
    in memory at once.
    """
    groups = optimizer.param_groups
    if any("foreach" in group and group["foreach"] is None and not group.get("fused") for group in groups):
        name = type(optimizer).__name__
        warn_once(
            log,
            f"offload_optimizer.device: none: {name} steps parameters that are evicted one by one, as with "
            "foreach=False. On an accelerator plain PyTorch takes foreach=None for True, and bits may differ. Make it "
            "with foreach=False, which has the same bits in both runs, or use offload_optimizer.device: nvme or cpu",
        )
