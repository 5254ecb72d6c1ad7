"""Everything a user can set: the pydantic models behind `config/*.yaml`.

    config = OffloadConfig.load("config/optimizer_nvme.yaml")
    config = OffloadConfig(nvme_path="/local_nvme", offload_optimizer={"device": "nvme", "master_weights": True})

A config is checked when it is made and does not change afterwards. Whatever is wrong with it, and however it was made,
is a `ConfigError` with one line for each mistake: the dotted field, the value given and the fix. `model_construct` is
pydantic's way around every check; do not use it.

`python -m swapper.config --schema config/schema.json` writes the JSON schema that editors complete and check files by.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from swapper.config.deepspeed import translate
from swapper.config.fields import Encoding, NvmePath, NvmePathLike, Size, Switch, parse_nvme_path
from swapper.config.files import check_suffix, prefixed, read_mapping
from swapper.config.section import Section
from swapper.errors import ConfigError, path_given
from swapper.sizes import format_size

__all__ = [
    "AioConfig",
    "CheckpointConfig",
    "OffloadConfig",
    "OffloadGradientConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "json_schema",
]

MINIMUM_BUCKET_BYTES = 16 << 10
"""Below this a drive spends its time on requests, not on bytes."""

DEFAULT_BUCKET_BYTES = 64 << 20

BLOCK_ALIGNMENT_BYTES = 4096
"""Every request must be a multiple of it, so that O_DIRECT works on every drive."""

BUCKETS_IN_POOL = 3
"""One arriving, one in use, one leaving."""


# --- The models ------------------------------------------------------------------------------------------------------


class OffloadOptimizerConfig(Section, frozen=True):
    """Where the optimizer's state lives, and in which form."""

    if TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None: ...  # [Note: what a type checker sees]

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where the state is between steps. "nvme": on the drive at `nvme_path`. "cpu": in host memory, for a model on a
    GPU; with a model on the CPU the state only moves to page-locked memory. Default and off: "none", where the
    optimizer keeps it; with `master_weights`, `step_in_backward` or gradients that are offloaded it is the same as
    "cpu", which is said."""

    master_weights: bool = Field(default=False, strict=True)
    """Keep an fp32 master copy of every bf16 and fp16 parameter, and step on that: mixed-precision training. fp32
    parameters need none and get none. With device "none" the masters live in memory of the host. Changes what the
    optimizer computes, so default and off: false."""

    encoding: Encoding = "exact"
    """How the state is stored. "exact" loses nothing: it is "packed" or "unpacked", which differ in no bit. "packed":
    the exponents of fp32 state take on the drive only the bits that they need; in memory, and with device "cpu", it is
    "unpacked". "exact" packs where a measurement at construction says that the drive is the slower part of a step, even
    so. "bf16" and "int8" are lossy: fp32 state is rounded at random so that averages stay right, and moves half the
    bytes, or a quarter; see docs/encodings.md. A mapping, such as `{exp_avg: int8, exp_avg_sq: bf16}`, says it for each
    tensor of the state by its name; others are unpacked. State under 16 KiB and masters are always exact, and sums that
    only grow never lossy. Else needs device "nvme" or "cpu" and steps on the CPU. Default: "exact"."""

    step_in_backward: bool = Field(default=False, strict=True)
    """Step each bucket as soon as the last gradient of its window has arrived, inside backward, and free the gradients;
    needs `gradient_accumulation_steps`. Cannot be combined with GradScaler, clipping by a global norm,
    DistributedDataParallel, step pre-hooks, or parameters that share memory with other tensors of the model (one
    parameter object used twice is fine). Default and off: false."""

    step_device: Literal["auto", "cpu", "device"] = "auto"
    """Where the step of a model on an accelerator is computed. "device": there, with the bits of the plain run there:
    state comes to it bucket by bucket and leaves it again, in memory for three buckets. "cpu": on copies in memory of
    the host, with the bits of a step on the CPU. Default: "auto", on the device if it has room when the optimizer is
    wrapped, else on the CPU, which is logged. A model on the CPU is always stepped there."""

    native_step: Switch = "auto"
    """How a step on the CPU is computed. "on": in one pass over memory by the native core, wherever a trial gives the
    bits of the optimizer's class, else by it. "auto": so where that is faster. "off": by the class. Default: "auto"."""

    @property
    def encodings(self) -> str:
        """The names of those that are not "exact", sorted, with commas; "" if there are none."""
        encoding = self.stored_encoding
        names = [encoding] if isinstance(encoding, str) else encoding.values()
        return ", ".join(sorted({*names} - {"exact"}))

    @property
    def stored_encoding(self) -> Encoding:
        """As `encoding`, but "exact" for "unpacked", and for "packed" too where nothing is on a drive."""
        as_it_is = ("exact", "unpacked") if self.device == "nvme" else ("exact", "unpacked", "packed")
        if isinstance(self.encoding, str):
            return "exact" if self.encoding in as_it_is else self.encoding
        return {key: name for key, name in self.encoding.items() if name not in as_it_is}

    @property
    def encodes(self) -> bool:
        """True if some state may be encoded."""
        return bool(self.encodings)

    @property
    def rounds(self) -> bool:
        """True if some state may be rounded."""
        return self.encodings not in ("", "packed")

    resident_bytes: Size = 0
    """Bytes of state kept in the pool from one step to the next, so that they are not read again (they are still
    written). Part of `pool_bytes`; needs device "nvme". Default and off: 0."""


class OffloadGradientConfig(Section, frozen=True):
    """Where gradients live from backward to the step."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where gradients are between backward and the step. "nvme": each is written to the drive as it arrives, and what
    arrives in further micro-batches is added there. "cpu": for a model on a GPU, each moves to the pool, which must
    hold them all; for a model on the CPU the same as "none", which is said. Gradients under 16 KiB stay where they are.
    Default and off: "none", where autograd puts them."""

    encoding: Literal["exact", "bf16"] = "exact"
    """How fp32 gradients are stored on the drive. "bf16" is lossy: each sum of micro-batches is rounded when it leaves,
    at random so that its mean is right, and moves half the bytes; see docs/encodings.md. Gradients of another dtype,
    and those that stay in memory, are exact. Needs device "nvme". Default and off: "exact"."""


class OffloadParamConfig(Section, frozen=True):
    """Where parameters live while no module uses them."""

    if TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None: ...  # [Note: what a type checker sees]

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters are while unused. "nvme": on the drive. "cpu": in host memory, where those of a model on the CPU
    are anyway; those of a model on an accelerator are in page-locked memory of their own. Default and off: "none", in
    the model."""

    resident_bytes: Size = 0
    """Bytes of parameters kept in the pool whatever is used next, so that they are not read again. Part of
    `pool_bytes`; needs device "nvme". What the pool has room for is kept anyway. Default and off: 0."""

    device_bytes: Size | None = None
    """For a model on an accelerator: most bytes of its memory that parameters take at once, with those that are copied
    ahead, and what it takes to see that they were changed. Default: None, what one module uses and the two records that
    come next. What it is must hold at least one module's, of fused experts two; an error says how much that is."""

    device_resident_bytes: Size = 0
    """For a model on an accelerator: bytes of parameters kept in its memory once they are there, so that they are not
    copied up again; the first ones of the model. What changes is written all the same. Part of `device_bytes`; needs
    device "nvme" or "cpu". Default and off: 0."""

    copy_on_write: bool = Field(default=False, strict=True)
    """With `swapper.offload(..., weights=PATH)`: a record of parameters that are changed is written to the run
    directory, and read from there from then on; else a change is an error. Default and off: false."""

    experts: Literal["auto", "whole"] = "auto"
    """With `swapper.offload(..., weights=PATH)`: how fused experts, one parameter for all of a layer, come. "auto":
    those that the router has chosen and no others, where the module's class is known to take them one at a time and
    `copy_on_write` is off; else whole, as the log says. So come the rows of an embedding on the CPU. Default: "auto".
    Off: "whole", all of a layer's, and all of an embedding."""


def _add_thread_count(schema: dict[str, Any]) -> None:
    schema["properties"]["thread_count"] = {
        **schema["properties"]["intra_op_parallelism"],
        "title": "Thread Count",
        "description": "DeepNVMe's older name of intra_op_parallelism.",
        "deprecated": True,
    }


class AioConfig(Section, frozen=True):
    """How the drive is driven. The names are DeepNVMe's; the defaults suit most drives."""

    # A name among its own aliases is accepted anyway; jsonargparse, of LightningCLI, needs to be told.
    model_config = ConfigDict(json_schema_extra=_add_thread_count, populate_by_name=True)

    if TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None: ...  # [Note: what a type checker sees]

    backend: Literal["auto", "uring", "aio", "threads"] = "auto"
    """Which system moves the bytes: io_uring, kernel AIO, or threads with ordinary reads and writes. A named one that
    the machine refuses is an error. Default: "auto", the first of these that works here."""

    block_size: Size = 1 << 20
    """Bytes in one request; a transfer is cut into requests of this size. A multiple of 4096, at most 1GiB. Default:
    "1MiB"."""

    queue_depth: int = Field(default=32, ge=1, le=4096, strict=True)
    """Requests in flight at once, 1 to 4096. Default: 32."""

    single_submit: bool = Field(default=False, strict=True)
    """Hand requests to the kernel one by one instead of in batches. Default and off: false."""

    overlap_events: bool = Field(default=True, strict=True)
    """Submit new requests while earlier ones are in flight. Default: true; false waits for each batch to finish."""

    intra_op_parallelism: int = Field(
        default=1, ge=1, le=64, strict=True, validation_alias=AliasChoices("intra_op_parallelism", "thread_count")
    )
    """Threads that work on one transfer, 1 to 64. Also accepted as `thread_count`, DeepNVMe's older name. Default and
    off: 1."""

    gds: Switch = "auto"
    """Whether records of a model on a GPU go between the drive and its memory by GPUDirect Storage (cuFile), without
    the pool: parameters that are read, and state that is stepped there. "auto": where that works; the log says why not.
    "on": an error where it does not, as with `verify`. Gradients, and parameters that are written, go through the pool.
    Default: "auto"; off: "off"."""

    @field_validator("block_size", mode="after")
    @classmethod
    def _check_block_size(cls, value: int) -> int:
        if value == 0 or value % BLOCK_ALIGNMENT_BYTES or value > 1 << 30:
            raise ConfigError(
                f"{value} bytes ({format_size(value)}) cannot be read with O_DIRECT in one request; write a multiple "
                f"of {BLOCK_ALIGNMENT_BYTES}, from 4KiB to 1GiB, such as '1MiB'"
            )
        return value


class CheckpointConfig(Section, frozen=True):
    """What happens to checkpoints."""

    keep_last: int | None = Field(default=None, ge=1, strict=True)
    """Checkpoints to keep: when `swapper.save_checkpoint` has made another, older ones of the same training beside it
    are removed, and their files used again. Default and off: null, keep all."""


def _add_dollar_schema(schema: dict[str, Any]) -> None:
    schema["properties"]["$schema"] = {"type": "string", "description": "Where an editor finds this schema; not read."}


class OffloadConfig(Section, frozen=True):
    """What is kept out of memory, where, and with how much of it.

    Sizes are bytes: 4096, "64MiB" (powers of 1024) or "2GB" (powers of 1000). Swappers given the same object share one
    pool, engine and run directory.
    """

    model_config = ConfigDict(json_schema_extra=_add_dollar_schema)

    if TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None: ...  # [Note: what a type checker sees]

    nvme_path: Annotated[NvmePath | None, BeforeValidator(parse_nvme_path)] = None
    """A directory on the drive to swap to, or a list of directories on several drives, whose bandwidths add up: each
    gets a part of the bytes in proportion to its speed, which all ranks measure at the start, at once. They must exist;
    `~` is your home; a relative path is relative to the working directory. Needed by device "nvme" and, of weights that
    stay in files (`swapper.offload(..., weights=PATH)`, `from_pretrained`), by `copy_on_write`. Default: null."""

    pool_bytes: Size = 1 << 30
    """Page-locked host memory for everything on its way to or from the drive, allocated once. At least three
    `bucket_bytes` (one arriving, one in use, one leaving) and what `resident_bytes` keeps. Default: "1GiB"."""

    bucket_bytes: Size = 0
    """Host memory that one bucket may take while it is stepped: state, master, fp32 gradient and encode buffer
    together. Larger ones make fewer, longer transfers. At least "16KiB". Default: 0, which chooses "64MiB", or if that
    is less a quarter of the pool, a sixth if gradients or parameters are on the drive too, an eighth if both are, and a
    seventh or a ninth if parameters are also stepped in backward."""

    verify: Literal["none", "crc32c"] = "none"
    """Check what comes back from the drive against a checksum of what was written. "crc32c": a CRC-32C of every block,
    in memory (8 bytes for each 64 KiB), computed by the I/O threads; a block that is not as it was written raises
    `SwapIOError` with the file and the offset. Used by device "nvme". Default and off: "none"."""

    gradient_accumulation_steps: int = Field(default=1, ge=1, strict=True)
    """Backward passes for each step of the optimizer: reading ahead starts in the last of them. Default: 1."""

    offload_optimizer: OffloadOptimizerConfig = Field(default_factory=OffloadOptimizerConfig)
    """The optimizer's state. Default and off: device "none"."""

    offload_gradient: OffloadGradientConfig = Field(default_factory=OffloadGradientConfig)
    """Gradients. Default and off: device "none"."""

    offload_param: OffloadParamConfig = Field(default_factory=OffloadParamConfig)
    """Parameters. Default and off: device "none"."""

    aio: AioConfig = Field(default_factory=AioConfig)
    """How the drive is driven."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """What happens to checkpoints."""

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The directories of `nvme_path`, however many: none, one or several."""
        if self.nvme_path is None:
            return ()
        return self.nvme_path if isinstance(self.nvme_path, tuple) else (self.nvme_path,)

    @property
    def following_bucket_bytes(self) -> int | None:
        """`bucket_bytes`, if it was not set and would grow with `pool_bytes`; else None."""
        follows = "bucket_bytes" not in self.model_fields_set and self.bucket_bytes < DEFAULT_BUCKET_BYTES
        return self.bucket_bytes if follows else None

    @field_validator("offload_optimizer", "offload_gradient", "offload_param", "aio", "checkpoint", mode="before")
    @classmethod
    def _empty_section_is_default(cls, value: object) -> object:
        if value is None:  # in YAML: a heading whose settings are all commented out
            return {}
        return dict(value) if isinstance(value, Mapping) else value

    @field_validator("bucket_bytes", mode="after")
    @classmethod
    def _check_bucket_bytes(cls, value: int) -> int:
        if 0 < value < MINIMUM_BUCKET_BYTES:
            raise ConfigError(f"{format_size(value)} is too little to move at once; write at least '16KiB'")
        return value

    @model_validator(mode="after")
    def _choose_bucket_bytes(self) -> OffloadConfig:
        if not self.bucket_bytes:
            chosen = (self.pool_bytes - self._resident_bytes) // self._parts_of_pool // 4096 * 4096
            chosen = min(DEFAULT_BUCKET_BYTES, chosen)
            # Around the frozen model's own check; not among the fields that were set, so that a copy chooses anew.
            self.__dict__["bucket_bytes"] = max(chosen, MINIMUM_BUCKET_BYTES)
        return self

    @model_validator(mode="after")
    def _check_together(self) -> OffloadConfig:
        lines = list(self._contradictions())
        if lines:
            raise ConfigError("\n".join(lines))
        return self

    def _contradictions(self) -> Iterator[str]:
        for name in ("offload_optimizer", "offload_gradient", "offload_param"):
            if getattr(self, name).device == "nvme" and self.nvme_path is None:
                yield (
                    f"nvme_path: null is not enough for {name}.device: nvme; give a directory on the drive: "
                    "nvme_path: /local_nvme in the file, nvme_path='/local_nvme' in Python"
                )
        for name, section in (("offload_optimizer", self.offload_optimizer), ("offload_param", self.offload_param)):
            if section.resident_bytes and section.device != "nvme":
                yield (
                    f"{name}.resident_bytes: {format_size(section.resident_bytes)} has no use with {name}.device: "
                    f"{section.device}; use device: nvme or resident_bytes: 0"
                )
        state = self.offload_optimizer
        names = state.encodings or ("" if state.encoding in ("exact", "unpacked") else "packed")
        if state.device == "none" and names:
            yield (
                f"offload_optimizer.encoding: {names} has no use with offload_optimizer.device: none, where "
                "the optimizer keeps its state; use device: nvme, device: cpu, or encoding: exact"
            )
        if state.encodes and state.step_device == "device":
            yield (
                f"offload_optimizer.encoding: {state.encodings} is for steps on the CPU, and "
                "offload_optimizer.step_device: device steps on the accelerator; use step_device: auto or cpu, or "
                "encoding: exact"
            )
        gradients = self.offload_gradient
        if gradients.encoding != "exact" and gradients.device != "nvme":
            yield (
                f"offload_gradient.encoding: {gradients.encoding} has no use with offload_gradient.device: "
                f"{gradients.device}, where gradients stay in memory; use device: nvme, or encoding: exact"
            )
        parameters = self.offload_param
        if (resident_bytes := parameters.device_resident_bytes) and parameters.device == "none":
            yield (
                f"offload_param.device_resident_bytes: {format_size(resident_bytes)} has no use with "
                "offload_param.device: none; use device: nvme, device: cpu, or device_resident_bytes: 0"
            )
        if parameters.device_bytes is not None and resident_bytes > parameters.device_bytes:
            yield (
                f"offload_param.device_bytes: {format_size(parameters.device_bytes)} is too small for "
                f"device_resident_bytes {format_size(resident_bytes)}, which is part of it; set it to at least "
                f"{resident_bytes}, or device_resident_bytes to less"
            )
        buckets_bytes = BUCKETS_IN_POOL * self.bucket_bytes
        if buckets_bytes + self._resident_bytes > self.pool_bytes:
            yield self._pool_sum(buckets_bytes, self._resident_bytes)

    @property
    def _resident_bytes(self) -> int:
        return self.offload_optimizer.resident_bytes + self.offload_param.resident_bytes

    @property
    def _parts_of_pool(self) -> int:
        """Count of buckets that one optimizer needs in the pool, as `PoolBudget` has it, and one for what rounds up."""
        parts = BUCKETS_IN_POOL + 1
        if self.offload_gradient.device == "nvme":
            parts += 2  # In use and arriving: of SGD with momentum they are as long as its state.
        if self.offload_param.device == "nvme":
            parts += 2 + self.offload_optimizer.step_in_backward
        return parts

    def _pool_sum(self, buckets_bytes: int, resident_bytes: int) -> str:
        rest_bytes = (self.pool_bytes - resident_bytes) // BUCKETS_IN_POOL
        rest_bytes -= rest_bytes % (1 << 20 if rest_bytes >= 1 << 20 else MINIMUM_BUCKET_BYTES)
        smaller = f", or bucket_bytes to at most '{format_size(rest_bytes)}'" if rest_bytes > 0 else ""
        resident = f" + resident_bytes {format_size(resident_bytes)}" if resident_bytes else ""
        total = format_size(buckets_bytes + resident_bytes)
        return (
            f"pool_bytes: {format_size(self.pool_bytes)} is too small for {BUCKETS_IN_POOL} x bucket_bytes "
            f"{format_size(self.bucket_bytes)} (one arriving, one in use, one leaving){resident} = {total}; "
            f"set pool_bytes to at least '{total}'{smaller}"
        )

    # --- Files ---

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, nvme_path: NvmePathLike | None = None) -> OffloadConfig:
        """The config in a file.

        Args:
            path: a .yaml, .yml or .json file. A key given twice in it is an error; a key `$schema` is skipped.
            nvme_path: used instead of the file's; None leaves it. A path or several.

        Raises:
            ConfigError: the file is missing, unreadable, empty or broken, or what it says cannot work. Each line of
                the message starts with the path.
        """
        __tracebackhide__ = True
        path = Path(path_given("path", path))
        check_suffix(path)
        document = read_mapping(path)
        if isinstance(document.get("$schema"), str):
            del document["$schema"]
        if nvme_path is not None:
            document["nvme_path"] = nvme_path
        try:
            return cls.model_validate(document)
        except ConfigError as error:
            raise prefixed(str(path), error) from None

    def to_yaml(self) -> str:
        """Every setting as YAML, defaults included; `load` reads it back to an equal config."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def with_nvme_path(self, path: NvmePathLike) -> OffloadConfig:
        """A copy that swaps to `path`. It is another object, so it shares no pool with this one."""
        __tracebackhide__ = True
        return self.model_copy(update={"nvme_path": path})

    @classmethod
    def from_deepspeed(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], *, nvme_path: NvmePathLike | None = None
    ) -> OffloadConfig:
        """The config that does what a DeepSpeed config asks for.

        It reads `zero_optimization.offload_optimizer` and, at stage 3, `offload_param` (device, nvme_path), `aio`, also
        inside `zero_optimization`, and `gradient_accumulation_steps`. `bf16.enabled` or `fp16.enabled` means
        `master_weights`, because DeepSpeed then keeps fp32 masters (unless `bf16_master_weights_and_grads` says that it
        does not). The value "auto" (Hugging Face's) counts as not given; for `enabled` it counts as true, since masters
        are made for bf16 and fp16 parameters only. Switches and numbers may be strings, as DeepSpeed's tuner prints
        them. `offload_param.max_in_cpu`, a number of elements, is `offload_param.resident_bytes` at 2 bytes an element,
        or 4 without bf16 and fp16, and `pool_bytes` is its default and that. Otherwise `pool_bytes` and `bucket_bytes`
        keep their defaults: DeepSpeed counts its buffers in elements of its largest sub-group (16 GB by default), which
        says nothing about the needs here.

        If DeepSpeed takes an offload device and offloads nothing (nvme below stage 3, anything at stage 0), swapper
        offloads the state, and says so. With state and parameters on nvme gradients go there too.

        Args:
            source: a DeepSpeed JSON file, or its content.
            nvme_path: used instead of the one in `source`; None leaves it. A path or several.

        Warns:
            UserWarning: once, with a line for each key that cannot be honoured and why.

        Raises:
            ConfigError: `source` cannot be read or cannot work.
        """
        __tracebackhide__ = True
        if isinstance(source, Mapping):
            name, document = "DeepSpeed config", dict(source)
        else:
            path = Path(path_given("source", source))
            name, document = str(path), read_mapping(path)
        try:
            values, unhonoured = translate(document, cls.model_fields["pool_bytes"].default)
            if nvme_path is not None:
                values["nvme_path"] = nvme_path
            config = cls.model_validate(values)
        except ConfigError as error:
            raise prefixed(name, error) from None
        if unhonoured:
            lines = "".join(f"\n  {line}" for line in unhonoured)
            warnings.warn(f"{name}: what swapper does otherwise than DeepSpeed:{lines}", UserWarning, stacklevel=2)
        return config


Section.whole = OffloadConfig


# --- The schema ------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, as in `config/schema.json`."""
    schema = _plain(OffloadConfig.model_json_schema())
    assert isinstance(schema, dict)
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _plain(value: Any) -> Any:
    """`value` without the line breaks of our docstrings, but for those between paragraphs.

    Also without the `allOf` that older versions of pydantic put around a reference, so that the file does not depend
    on the version.
    """
    if isinstance(value, dict):
        everything = value.get("allOf")
        if isinstance(everything, list) and len(everything) == 1:
            value = {**everything[0], **{key: inner for key, inner in value.items() if key != "allOf"}}
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return re.sub(r"(?<!\n)\n(?!\n)", " ", value) if isinstance(value, str) else value


for _section in (
    *(AioConfig, CheckpointConfig, OffloadConfig),
    *(OffloadGradientConfig, OffloadOptimizerConfig, OffloadParamConfig),
):
    _section.__module__ = "swapper.config"  # Pickles, and the safe globals of torch, know them by their public name.
