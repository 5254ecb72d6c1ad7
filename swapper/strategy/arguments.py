"""What the arguments of a strategy mean: a config, or the keyword arguments of Lightning's `DeepSpeedStrategy`."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from swapper.config import OffloadConfig, read_mapping
from swapper.errors import ConfigError, show

if TYPE_CHECKING:
    ConfigLike = OffloadConfig | str | os.PathLike[str] | Mapping[str, Any]
else:
    # What LightningCLI sees: what a mapping or a file has is checked as a config when it is parsed.
    ConfigLike = OffloadConfig

__all__ = [
    "ARGUMENTS",
    "MEANINGLESS",
    "NAMES",
    "NAMES_OF_ARGUMENTS",
    "ConfigLike",
    "default_nvme_path",
    "given_among",
    "not_of_ddp",
    "packages_in_use",
    "register",
    "settings_of",
]

_BUFFERS = "memory is bounded by pool_bytes of a config instead"
_SHARDING = "it is about sharding and communication, and every process keeps all it is given"
_SCALING = "Trainer(precision=...) scales the loss"
_ACTIVATIONS = "use torch.utils.checkpoint in the model"

MEANINGLESS: dict[str, str] = {
    "zero_optimization": _SHARDING,
    "stage": _SHARDING,
    "remote_device": "configure_model builds on the drive if parameters are offloaded to nvme",
    "params_buffer_count": _BUFFERS,
    "params_buffer_size": _BUFFERS,
    "max_in_cpu": _BUFFERS,
    "optimizer_buffer_count": _BUFFERS,
    "sub_group_size": _BUFFERS,
    "pin_memory": "the pool is always page-locked, where the limit allows",
    "contiguous_gradients": _SHARDING,
    "overlap_comm": _SHARDING,
    "allgather_partitions": _SHARDING,
    "reduce_scatter": _SHARDING,
    "allgather_bucket_size": _SHARDING,
    "reduce_bucket_size": _SHARDING,
    "zero_allow_untested_optimizer": "what cannot be swapped exactly is refused by name",
    "logging_batch_size_per_gpu": "nothing needs the size of a batch",
    "logging_level": "set it with the module logging",
    "loss_scale": _SCALING,
    "initial_scale_power": _SCALING,
    "loss_scale_window": _SCALING,
    "hysteresis": _SCALING,
    "min_loss_scale": _SCALING,
    "partition_activations": _ACTIVATIONS,
    "cpu_checkpointing": _ACTIVATIONS,
    "contiguous_memory_optimization": _ACTIVATIONS,
    "synchronize_checkpoint_boundary": _ACTIVATIONS,
    "load_full_weights": "ordinary Lightning checkpoints are loaded anyway",
    "exclude_frozen_parameters": "checkpoints have all parameters",
}
"""Arguments of `DeepSpeedStrategy` that have no meaning here, and why."""

ARGUMENTS = """Args:
        config: an `OffloadConfig`, a mapping, or the path of a YAML or JSON file; also DeepSpeed's JSON or what it
            holds, read by `OffloadConfig.from_deepspeed`. With neither this nor arguments of `DeepSpeedStrategy` the
            optimizer's state goes to NVMe.
        checkpoint_format: "directory" (the default, unless `checkpoint_io` is given) publishes what is on the drive by
            hard links; "full" writes the files of the stock strategy. Both are read.
        offload_optimizer, offload_optimizer_device: keep the optimizer's state on "cpu" (the default) or "nvme".
        offload_parameters, offload_params_device: the same for parameters. With both on "nvme" gradients go there too.
        nvme_path: a directory on the drive. Default: those in $SWAPPER_NVME_PATH, else `./.swapper`, which is made.
        block_size, queue_depth, single_submit, overlap_events, thread_count: as `aio` of a config.
        accelerator, checkpoint_io, precision_plugin: as for the stock strategy.
        deepspeed: other arguments of `DeepSpeedStrategy` have no meaning here, and are named in one warning.

    Raises:
        ConfigError: config and arguments are both given, or cannot work.
"""

NAMES: Mapping[str, dict[str, Any]] = {
    "swapper_cpu": {"offload_optimizer": True, "offload_optimizer_device": "cpu"},
    "swapper_nvme": {"offload_optimizer": True, "offload_optimizer_device": "nvme"},
    "swapper_nvme_all": {
        "offload_optimizer": True,
        "offload_optimizer_device": "nvme",
        "offload_parameters": True,
        "offload_params_device": "nvme",
    },
}
"""Names of strategies for one device, and their arguments."""

_AIO = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "single_submit": "single_submit",
    "overlap_events": "overlap_events",
    "thread_count": "intra_op_parallelism",
}

_OFFLOADING = (
    "offload_optimizer",
    "offload_optimizer_device",
    "offload_parameters",
    "offload_params_device",
    "nvme_path",
)

NAMES_OF_ARGUMENTS = frozenset({*_OFFLOADING, *_AIO, *MEANINGLESS})
"""All arguments of `DeepSpeedStrategy` that are accepted."""


def default_nvme_path() -> Path | tuple[Path, ...]:
    """Where files go if nobody said: the directories in $SWAPPER_NVME_PATH, else `./.swapper`, which is made."""
    named = [Path(path) for path in os.environ.get("SWAPPER_NVME_PATH", "").split(os.pathsep) if path]
    if named:
        return tuple(named) if len(named) > 1 else named[0]
    path = Path(".swapper")
    path.mkdir(exist_ok=True)
    return path


def settings_of(name: str, config: ConfigLike | None, given: Mapping[str, Any]) -> OffloadConfig:
    """The config that the arguments of a strategy ask for.

    Args:
        name: of the strategy, for messages.
        config: as the user gave it.
        given: arguments of `DeepSpeedStrategy`; None counts as not given, except for those without a meaning.

    Returns:
        The config; with neither `config` nor arguments, one with the optimizer's state on the drive.

    Warns:
        UserWarning: once, if arguments have no meaning here, or nothing is offloaded.

    Raises:
        ConfigError: both are given; an argument is unknown; the config cannot work.
    """
    for argument in given:
        if argument not in NAMES_OF_ARGUMENTS:
            near = difflib.get_close_matches(argument, NAMES_OF_ARGUMENTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{argument}: {name} has no such argument{hint}")
    idle = [argument for argument in given if argument in MEANINGLESS]
    meant = {argument: value for argument, value in given.items() if value is not None and argument not in idle}
    if config is not None and (meant or idle):
        names = ", ".join([*meant, *idle])
        raise ConfigError(f"{name} was given a config and {names} too; put all of it into the config")
    if idle:
        lines = "".join(f"\n  {argument}: {MEANINGLESS[argument]}" for argument in idle)
        warnings.warn(f"arguments that have no meaning for {name}:{lines}", UserWarning, stacklevel=4)
    if config is None:
        return _from_arguments(name, meant if meant or idle else {"offload_optimizer": True, **_ON_NVME})
    if isinstance(config, OffloadConfig):
        return config
    if isinstance(config, Mapping):
        is_deepspeeds = "zero_optimization" in config
        return OffloadConfig.from_deepspeed(config) if is_deepspeeds else OffloadConfig.model_validate(dict(config))
    path = Path(config)
    if path.suffix == ".json" and "zero_optimization" in read_mapping(path):
        return OffloadConfig.from_deepspeed(path)
    return OffloadConfig.load(path)


_ON_NVME = {"offload_optimizer_device": "nvme"}


def _from_arguments(name: str, given: Mapping[str, Any]) -> OffloadConfig:
    devices, unused = {}, []
    for switch, argument in (
        ("offload_optimizer", "offload_optimizer_device"),
        ("offload_parameters", "offload_params_device"),
    ):
        wanted = given.get(switch, False)
        if not isinstance(wanted, bool):
            raise ConfigError(f"{switch}: {show(wanted)} is not a switch; write True or False")
        device = given.get(argument, "cpu")
        if device not in ("cpu", "nvme"):
            raise ConfigError(f"{argument}: {show(device)} is not one of cpu, nvme")
        devices[switch] = device if wanted else "none"
        if argument in given and not wanted:
            unused.append(f"\n  {argument}: it needs {switch}=True")
    if "nvme" not in devices.values():
        unused += [f"\n  {argument}: nothing goes to nvme" for argument in ("nvme_path", *_AIO) if argument in given]
    state, parameters = devices["offload_optimizer"], devices["offload_parameters"]
    if state == parameters == "none":
        warnings.warn(
            f"{name} was given arguments, and neither offload_optimizer=True nor offload_parameters=True: nothing is "
            "offloaded",
            UserWarning,
            stacklevel=5,
        )
    values: dict[str, Any] = {
        "offload_optimizer": {"device": state},
        # As large as the parameters: what is for models that do not fit leaves neither in memory.
        "offload_gradient": {"device": "nvme" if state == parameters == "nvme" else "none"},
        "offload_param": {"device": parameters},
        "aio": {ours: given[theirs] for theirs, ours in _AIO.items() if theirs in given},
    }
    if "nvme" in (state, parameters):
        values["nvme_path"] = given.get("nvme_path") or default_nvme_path()
    config = OffloadConfig.model_validate(values)
    if unused and (state, parameters) != ("none", "none"):
        warnings.warn(f"arguments of {name} without effect:{''.join(unused)}", UserWarning, stacklevel=5)
    return config


def given_among(variables: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of the arguments that mean something here, among the local variables of a constructor."""
    return {name: value for name, value in variables.items() if name in NAMES_OF_ARGUMENTS and value is not None}


def register(registry: Any, classes: Mapping[str, Any]) -> None:
    """Put the strategies in `classes` into a registry of Lightning's, by their names. May be called again."""
    for name, arguments in NAMES.items():
        registry.register(name, classes["SwapStrategy"], description=f"swapper: {name}", override=True, **arguments)
    ddp = classes["SwapDDPStrategy"]
    registry.register("swapper_ddp_nvme", ddp, description="swapper: ddp", override=True, **NAMES["swapper_nvme"])


def not_of_ddp(strategy: type, given: Mapping[str, Any]) -> list[str]:
    """The names in `given` that neither a base of `strategy` takes nor `DistributedDataParallel`."""
    classes = (DistributedDataParallel, *strategy.__mro__)
    inits = [vars(each)["__init__"] for each in classes if "__init__" in vars(each)]
    known = {name for init in inits for name in inspect.signature(init).parameters}
    return [name for name in given if name in NAMES_OF_ARGUMENTS or name not in known]


def packages_in_use(name: str, packages: Sequence[str]) -> list[str]:
    """Those of `packages` that strategies are wanted for, the first first: imported ones, else one that is installed.

    Raises:
        ImportError: none is; the message says what `name` needs.
    """
    imported = [package for package in packages if sys.modules.get(package)]
    if imported:
        return imported
    for package in packages:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return [package]
    raise ImportError(f"{name} needs Lightning: pip install 'tensor-swapper[lightning]'")
