"""Settings of bitsandbytes for single parameters, which its classes find in a `GlobalOptimManager`.

The Trainer of transformers gives embeddings 32 bits so where `optim` has 8. Its classes find them by the position in
`param_groups` and by `id`. Where a class is shown only some parameters, or others in their place, it is lent a manager
that has the settings at the positions where they are shown.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["Settings", "has_manager", "lent_manager", "settings_of", "take_settings"]

Settings = Mapping[str, Any]


def has_manager(optimizer: Optimizer) -> bool:
    """True if the class may find settings for single parameters."""
    return _manager_of(optimizer) is not None


def settings_of(optimizer: Optimizer) -> dict[int, Settings]:
    """Return the settings that the class's next step finds for parameters with settings of their own, by `id`."""
    if (manager := _manager_of(optimizer)) is None:
        return {}
    by_module: dict[int, Settings] = {}
    if not vars(optimizer).get("initialized"):  # The first step looks for them, the last one counts.
        triples = manager.module_weight_config_triple
        by_module = {id(getattr(module, name, None)): settings for module, name, settings in triples}
    by_position, by_id = manager.index2config, manager.pid2config
    if not (by_module or by_position or by_id):
        return {}
    found: dict[int, Settings] = {}
    for number, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if (number, i) in by_position or id(p) in by_id or id(p) in by_module:
                # Which of them count its version of bitsandbytes knows.
                known = optimizer.get_config(number, i, group)  # type: ignore[attr-defined]
                found[id(p)] = {**known, **by_module.get(id(p), {})}
    return found


def take_settings(optimizer: Optimizer) -> dict[int, Settings]:
    """`settings_of`, as a step begins; in the first one the manager takes note of them, as it does in a plain step."""
    if _manager_of(optimizer) is not None and not vars(optimizer).get("initialized"):
        look_for_settings: Any = getattr(optimizer, "check_overrides", None)
        if look_for_settings is not None:
            look_for_settings()
    return settings_of(optimizer)


def lent_manager(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], settings: Mapping[torch.Tensor, Settings]
) -> dict[str, Any]:
    """Attributes of the optimizer while its class is shown `groups`; none if it is not of bitsandbytes.

    Args:
        groups: what it will find as `param_groups`.
        settings: of those parameters in them that have some.
    """
    if (manager := _manager_of(optimizer)) is None:
        return {}
    lent = copy.copy(manager)
    lent.module_weight_config_triple, lent.pid2config = [], {}
    lent.index2config = {
        (number, i): settings[p]
        for number, group in enumerate(groups)
        for i, p in enumerate(group["params"])
        if p in settings
    }
    # State that is swapped needs no paged memory, of which bitsandbytes keeps all that it has made.
    return {"mng": lent, "is_paged": False}


def _manager_of(optimizer: Optimizer) -> Any:
    manager = vars(optimizer).get("mng")
    return manager if type(manager).__module__.split(".")[0] == "bitsandbytes" else None
