"""`swapper.config`: what is accepted, what is refused and in which words, and the files in `config/`."""

from __future__ import annotations

import copy
import json
import pickle
import re
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import error_of
from hypothesis import given
from hypothesis import strategies as st
from launcher import run_program
from pydantic import BaseModel
from repository import ROOT

import swapper
from swapper.config import (
    AioConfig,
    OffloadConfig,
    OffloadOptimizerConfig,
    format_size,
    json_schema,
    parse_size,
)
from swapper.errors import ConfigError

CONFIG_FILES = sorted((ROOT / "config").glob("*.yaml"))


NVME = {"nvme_path": "/local_nvme", "offload_optimizer": {"device": "nvme"}}


def as_keywords(values: dict[str, Any]) -> OffloadConfig:
    return OffloadConfig(**values)


def as_json(values: dict[str, Any]) -> OffloadConfig:
    return OffloadConfig.model_validate_json(json.dumps(values))


def as_copy(values: dict[str, Any]) -> OffloadConfig:
    return OffloadConfig().model_copy(update=values)


WAYS: dict[str, Callable[[dict[str, Any]], OffloadConfig]] = {
    "keywords": as_keywords,
    "model_validate": OffloadConfig.model_validate,
    "model_validate_json": as_json,
    "model_copy": as_copy,
}


def refused(**values: Any) -> str:
    return error_of(lambda: OffloadConfig(**values))


# --- Defaults and values ---


def test_defaults_swap_nothing() -> None:
    config = OffloadConfig()
    assert config.nvme_path is None
    assert config.pool_bytes == 1 << 30
    assert config.bucket_bytes == 64 << 20
    assert config.verify == "none"
    assert config.gradient_accumulation_steps == 1
    assert config.offload_optimizer == OffloadOptimizerConfig()
    assert config.offload_optimizer.device == config.offload_gradient.device == config.offload_param.device == "none"
    assert config.offload_optimizer.master_weights is False
    assert config.offload_optimizer.encoding == "exact"
    assert config.offload_optimizer.step_in_backward is False
    assert config.offload_optimizer.resident_bytes == config.offload_param.resident_bytes == 0
    assert config.aio.model_dump() == {
        "backend": "auto",
        "block_size": 1 << 20,
        "queue_depth": 32,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 1,
        "gds": "auto",
    }
    assert config.checkpoint.keep_last is None


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_of_making_one_gives_the_same(way: Callable[[dict[str, Any]], OffloadConfig]) -> None:
    values = {**NVME, "pool_bytes": "2GiB", "aio": {"thread_count": 4}}
    config = way(values)
    assert config.nvme_path == Path("/local_nvme")
    assert config.pool_bytes == 2 << 30
    assert config.aio.intra_op_parallelism == 4
    assert config == OffloadConfig(**values)


def test_sections_may_be_objects_mappings_or_empty() -> None:
    section = OffloadOptimizerConfig(device="cpu")
    config = OffloadConfig(offload_optimizer=section, aio=types.MappingProxyType({"queue_depth": 8}), checkpoint=None)
    assert config.offload_optimizer is section
    assert config.aio.queue_depth == 8
    assert config.checkpoint.keep_last is None


def test_master_weights_are_allowed_without_offload() -> None:
    assert OffloadConfig(offload_optimizer={"master_weights": True}).offload_optimizer.master_weights


@pytest.mark.parametrize("make", [list, tuple])
def test_nvme_path_takes_several_directories(
    make: Callable[[list[str]], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    paths = (Path("/a"), Path("/home/somebody/b"))
    config = OffloadConfig(nvme_path=make(["/a", "~/b"]), offload_optimizer={"device": "nvme"})
    assert config.nvme_path == config.nvme_paths == paths
    assert OffloadConfig(nvme_path="/x").with_nvme_path(["/a", "~/b"]).nvme_paths == paths
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert OffloadConfig.load(file) == config
    assert OffloadConfig.load(file, nvme_path=["/c", "/d"]).nvme_paths == (Path("/c"), Path("/d"))
    assert OffloadConfig.model_validate_json(config.model_dump_json()) == config


def test_a_directory_that_is_there_twice_is_refused() -> None:
    assert refused(nvme_path=["/a", "/b", "/a/"]) == "nvme_path: '/a' is there twice; name each drive once"


@pytest.mark.parametrize(
    "value", [["/a", 3], ["/a", None], ["/a", " "], ["/a", ["/b"]], [[]], ["~nobody-of-that-name/x"]]
)
def test_a_list_with_something_that_is_no_path_is_refused(value: object) -> None:
    message = refused(nvme_path=value)
    assert message.startswith("nvme_path: ")
    assert "write" in message


def test_verify_is_a_word() -> None:
    assert OffloadConfig().verify == "none"
    assert OffloadConfig(verify="crc32c").verify == "crc32c"
    assert refused(verify="crc32") == "verify: 'crc32' is not one of none, crc32c; did you mean 'crc32c'?"
    for value, switch in (
        ("off", "off"),
        ("auto", "auto"),
        (False, "off"),
        (True, "on"),
    ):  # YAML reads a plain off as false.
        assert OffloadConfig(offload_optimizer={"native_step": value}).offload_optimizer.native_step == switch
        assert OffloadConfig(aio={"gds": value}).aio.gds == switch
    assert refused(offload_optimizer={"native_step": 1}).startswith("offload_optimizer.native_step: ")
    assert refused(aio={"gds": None}) == "aio.gds: None is not one of auto, on, off"
    assert refused(verify=True).startswith("verify: True is not one of none, crc32c")


def test_nvme_path_takes_home_path_objects_and_a_list_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert OffloadConfig(nvme_path="~/swap").nvme_path == Path("/home/somebody/swap")
    assert OffloadConfig(nvme_path=Path("~/swap")).nvme_path == Path("/home/somebody/swap")
    assert OffloadConfig(nvme_path=["/a"]).nvme_path == Path("/a")
    assert OffloadConfig(nvme_path=["/a"]).nvme_paths == (Path("/a"),)
    assert OffloadConfig().nvme_paths == ()
    assert OffloadConfig(nvme_path="./.swapper").nvme_path == Path(".swapper")


@pytest.mark.parametrize("value", ["", "  ", "a\0b", 3, True, [], [3], {"a": 1}, "~nobody-of-this-name/x"])
def test_nvme_path_that_is_no_path_is_refused(value: object) -> None:
    assert refused(nvme_path=value).startswith("nvme_path: ")


# --- Sizes ---


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("0", 0),
        ("12 B", 12),
        ("64MiB", 64 << 20),
        ("64mib", 64 << 20),
        (" 64 MiB ", 64 << 20),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("0.5KiB", 512),
        ("1KB", 1000),
        ("1TiB", 1 << 40),
        ("1PB", 10**15),
    ],
)
def test_size_is_read(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "True is not a size"),
        (None, "None is not a size"),
        (1.5, "1.5 is not a size"),
        ([1], r"\[1\] is not a size"),
        (-1, "-1 is negative"),
        ("-1MiB", "'-1MiB' is negative"),
        ("", "'' is not a size"),
        ("MiB", "'MiB' is not a size"),
        ("lots", "'lots' is not a size"),
        ("1e9", "'1e9' is not a size"),
        ("1 2", "'1 2' is not a size"),
        ("٣", "is not a size"),
        ("5 parsec", "'5 parsec' has the unknown unit 'parsec'; use B, KiB"),
        ("64M", "'64M' can mean two sizes; write '64MiB' .* or '64MB'"),
        ("0.3B", "'0.3B' is not a whole number of bytes; the nearest is 0"),
        (2**63, "is larger than any machine's memory"),
        ("9999999PiB", "is larger than any machine's memory"),
        ("9" * 5000, r"\(5002 characters\) is not a size"),
    ],
)
def test_size_that_is_none_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_size(value)
    assert re.search(f"^pool_bytes: .*{message}", refused(pool_bytes=value))


@given(st.integers(0, 2**63 - 1))
def test_size_text_is_exact(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(0, 1023), st.sampled_from(["KiB", "MiB", "GiB", "KB", "MB", "GB"]))
def test_size_text_is_short(count: int, unit: str) -> None:
    assert len(format_size(parse_size(f"{count}{unit}"))) <= len(f"{count}{unit}")


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers())))
def test_size_is_bytes_or_a_config_error(value: object) -> None:
    try:
        assert 0 <= parse_size(value) < 2**63
    except ConfigError as error:
        assert "\n" not in str(error)


# --- Refusals: unknown keys ---


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"offload_optimizer": {"devise": "nvme"}}, "offload_optimizer.devise: unknown key; did you mean 'device'?"),
        ({"pool_size": 1}, "pool_size: unknown key; did you mean 'pool_bytes'?"),
        ({"pool-bytes": 1}, "pool-bytes: unknown key; did you mean 'pool_bytes'?"),
        ({"AIO": {}}, "AIO: unknown key; did you mean 'aio'?"),
        ({"aio": {"threads_count": 1}}, "aio.threads_count: unknown key; did you mean 'thread_count'?"),
        ({"queue_depth": 1}, "queue_depth: unknown key here; did you mean 'aio.queue_depth'?"),
        (
            {"offload_optimizer": {"nvme_path": "/x"}},
            "offload_optimizer.nvme_path: unknown key here; did you mean 'nvme_path' at the top level?",
        ),
        (
            {"resident_bytes": 1},
            "resident_bytes: unknown key here; did you mean 'offload_optimizer.resident_bytes' or "
            "'offload_param.resident_bytes'?",
        ),
        ({"checkpoint": {"zzz": 1}}, "checkpoint.zzz: unknown key; known here are keep_last"),
    ],
)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_unknown_key_is_refused_with_the_nearest(
    way: Callable[[dict[str, Any]], OffloadConfig], values: dict[str, Any], message: str
) -> None:
    assert error_of(lambda: way(values)) == message


def test_deepspeed_file_is_recognised() -> None:
    assert "from_deepspeed" in refused(zero_optimization={"stage": 3})


def test_unknown_key_of_a_section_made_alone_is_refused() -> None:
    assert error_of(lambda: OffloadOptimizerConfig(devise="nvme")) == "devise: unknown key; did you mean 'device'?"


def test_both_names_of_a_setting_are_refused() -> None:
    message = refused(aio={"intra_op_parallelism": 2, "thread_count": 2})
    assert message == (
        "aio.thread_count: another name of 'intra_op_parallelism', which is given too; delete one of them"
    )


@pytest.mark.parametrize("values", [{1: 2}, {"aio": {True: 1}}, {"aio": {"queue_depth": {None: 1}}}])
def test_key_that_is_no_string_is_refused(values: dict[str, Any]) -> None:
    message = error_of(lambda: OffloadConfig.model_validate(values))
    assert ": " in message
    assert "aio" not in values or message.startswith("aio.")


# --- Refusals: values ---


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"offload_optimizer": {"device": "nvm"}}, "offload_optimizer.device: 'nvm' is not one of none, cpu, nvme; "),
        ({"offload_optimizer": {"device": "NVMe"}}, "offload_optimizer.device: 'NVMe' .* did you mean 'nvme'?"),
        ({"offload_optimizer": {"device": "disk"}}, "offload_optimizer.device: 'disk' is not one of none, cpu, nvme$"),
        ({"offload_optimizer": {"device": None}}, "offload_optimizer.device: None is not one of none, cpu, nvme"),
        ({"offload_optimizer": {"master_weights": 1}}, "offload_optimizer.master_weights: 1 is not a switch; write tr"),
        ({"offload_optimizer": {"master_weights": "yes"}}, "offload_optimizer.master_weights: 'yes' is not a switch"),
        ({"offload_optimizer": "nvme"}, "offload_optimizer: 'nvme' is not a mapping .* offload_optimizer: {device: nv"),
        ({"aio": 3}, r"aio: 3 is not a mapping of its keys \(backend, block_size, "),
        ({"verify": "sha1"}, "verify: 'sha1' is not one of none, crc32c"),
        (
            {"gradient_accumulation_steps": 0},
            "gradient_accumulation_steps: 0 is not allowed; write a whole number of 1",
        ),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps: True is not allowed"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps: 1.5 is not allowed"),
        ({"aio": {"queue_depth": 0}}, "aio.queue_depth: 0 is not allowed; write a whole number from 1 to 4096"),
        ({"aio": {"queue_depth": 4097}}, "aio.queue_depth: 4097 is not allowed; write a whole number from 1 to 4096"),
        ({"aio": {"queue_depth": "8"}}, "aio.queue_depth: '8' is not allowed"),
        ({"aio": {"thread_count": 65}}, "aio.thread_count: 65 is not allowed; write a whole number from 1 to 64"),
        ({"aio": {"intra_op_parallelism": 0}}, "aio.intra_op_parallelism: 0 is not allowed; .* from 1 to 64"),
        ({"aio": {"backend": "io_uring"}}, "aio.backend: 'io_uring' is not one of .*; did you mean 'uring'?"),
        ({"aio": {"block_size": 5000}}, "aio.block_size: 5000 bytes .*a multiple of 4096"),
        ({"aio": {"block_size": 0}}, "aio.block_size: 0 bytes .*a multiple of 4096"),
        ({"aio": {"block_size": "2GiB"}}, "aio.block_size: 2147483648 bytes .*to 1GiB"),
        ({"bucket_bytes": "4KiB"}, "bucket_bytes: 4KiB is too little .* at least '16KiB'"),
        ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last: 0 is not allowed; write a whole number of 1 or more"),
    ],
)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_wrong_value_is_named_with_the_fix(
    way: Callable[[dict[str, Any]], OffloadConfig], values: dict[str, Any], message: str
) -> None:
    assert re.search("^" + message, error_of(lambda: way(values)))


def test_every_mistake_has_its_line() -> None:
    message = refused(pool_bytes="x", offload_optimizer={"device": "d", "devise": 1}, aio={"queue_depth": -1}, foo=1)
    fields = [line.split(":")[0] for line in message.splitlines()]
    assert fields == ["pool_bytes", "offload_optimizer.device", "offload_optimizer.devise", "aio.queue_depth", "foo"]


def test_long_values_are_shortened() -> None:
    message = refused(verify="x" * 10_000)
    assert len(message) < 200


@pytest.mark.parametrize("value", [[], "text", 3, None])
def test_what_is_no_mapping_is_refused(value: object) -> None:
    assert error_of(lambda: OffloadConfig.model_validate(value)).startswith("the config: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2: not valid JSON"),
        ("", "line 1, column 1: not valid JSON"),
        ('{"aio": {},\n "aio": {}}', "key 'aio' is given twice"),
        (b'{"a": "\xff"}', "save it as UTF-8"),
        ("[" * 100_000, "nested too deeply|not valid JSON"),
    ],
)
def test_broken_json_text_is_refused(text: str | bytes, message: str) -> None:
    assert re.search(message, error_of(lambda: OffloadConfig.model_validate_json(text)))


def test_strings_are_validated() -> None:
    config = OffloadConfig.model_validate_strings({"pool_bytes": "2GiB", "aio": {"backend": "aio"}})
    assert config.pool_bytes == 2 << 30
    assert config.aio.backend == "aio"
    message = error_of(lambda: OffloadConfig.model_validate_strings({"pool_bytes": "2", "foo": "1"}))
    assert message.startswith("foo: unknown key")


# --- Single fields ---


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("on", "on"), ("yes", "on"), ("off", "off"), ("'off'", "off"), ("no", "off")]
)
def test_a_switch_is_what_yaml_makes_of_it(tmp_path: Path, text: str, value: str) -> None:
    """Without quotes `on` and `off` are booleans there."""
    path = tmp_path / "config.yaml"
    path.write_text(f"aio: {{gds: {text}}}")
    assert OffloadConfig.load(path).aio.gds == value


@pytest.mark.parametrize(
    "value",
    ["bf16", "int8", {"exp_avg": "bf16", "exp_avg_sq": "exact"}, {"exp_avg": "int8", "exp_avg_sq": "bf16"}],
    ids=["bf16", "int8", "by-key", "both"],
)
def test_encodings_go_through_files_and_json(tmp_path: Path, value: object) -> None:
    settings = {"nvme_path": str(tmp_path), "offload_optimizer": {"device": "nvme", "encoding": value}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    config = OffloadConfig.load(path)
    assert config.offload_optimizer.encoding == value and config.offload_optimizer.encodes
    assert OffloadConfig.model_validate_json(config.model_dump_json()) == config == copy.deepcopy(config)
    others = [OffloadConfig.load(path), pickle.loads(pickle.dumps(config)), copy.deepcopy(config)]
    assert {hash(config), *map(hash, others)} == {hash(config)}, "equal configs have one hash"
    assert len({config, *others, config.model_copy(update={"pool_bytes": 2 << 30})}) == 2


# --- Refusals: combinations ---


def test_nvme_without_path_is_refused() -> None:
    message = refused(offload_optimizer={"device": "nvme"})
    assert message.startswith("nvme_path: null is not enough for offload_optimizer.device: nvme; ")
    assert "nvme_path='/local_nvme'" in message


def test_pool_smaller_than_three_buckets_shows_the_sum() -> None:
    assert refused(pool_bytes="128MiB", bucket_bytes="64MiB") == (
        "pool_bytes: 128MiB is too small for 3 x bucket_bytes 64MiB (one arriving, one in use, one leaving) = 192MiB; "
        "set pool_bytes to at least '192MiB', or bucket_bytes to at most '42MiB'"
    )
    assert OffloadConfig(pool_bytes="192MiB").pool_bytes == 192 << 20
    assert OffloadConfig(pool_bytes="128MiB", bucket_bytes="42MiB").bucket_bytes == 42 << 20
    assert OffloadConfig(pool_bytes="192KiB", bucket_bytes="64KiB").bucket_bytes == 64 << 10
    assert "or bucket_bytes" not in refused(pool_bytes=0)


def test_bucket_bytes_that_is_not_given_follows_the_pool() -> None:
    assert OffloadConfig().bucket_bytes == OffloadConfig(pool_bytes="100GiB").bucket_bytes == 64 << 20
    small = OffloadConfig(pool_bytes="128MiB")
    assert small.bucket_bytes == 32 << 20
    assert small.model_copy(update={"pool_bytes": "1GiB"}).bucket_bytes == 64 << 20
    section = {"device": "nvme", "resident_bytes": "900MiB"}
    assert OffloadConfig(nvme_path="/x", offload_optimizer=section).bucket_bytes == 31 << 20


def test_resident_bytes_are_part_of_the_pool() -> None:
    section = {"device": "nvme", "resident_bytes": "900MiB"}
    assert refused(nvme_path="/x", bucket_bytes="64MiB", offload_optimizer=section) == (
        "pool_bytes: 1GiB is too small for 3 x bucket_bytes 64MiB (one arriving, one in use, one leaving) "
        "+ resident_bytes 900MiB = 1092MiB; set pool_bytes to at least '1092MiB', or bucket_bytes to at most '41MiB'"
    )
    config = OffloadConfig(nvme_path="/x", pool_bytes="1092MiB", offload_optimizer=section)
    assert config.offload_optimizer.resident_bytes == 900 << 20


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_resident_bytes_without_nvme_are_refused(device: str) -> None:
    message = refused(offload_optimizer={"device": device, "resident_bytes": "1MiB"})
    assert message.startswith(
        f"offload_optimizer.resident_bytes: 1MiB has no use with offload_optimizer.device: {device}"
    )


# --- What a config is once made ---


def test_config_does_not_change() -> None:
    config = OffloadConfig(**NVME)
    assert error_of(lambda: setattr(config, "pool_bytes", 1)).startswith("pool_bytes: 1 cannot be set")
    assert error_of(lambda: setattr(config.aio, "queue_depth", 1)).startswith("queue_depth: 1 cannot be set")
    assert error_of(lambda: setattr(config, "new", 1)).startswith("new: 1 cannot be set")
    assert error_of(lambda: delattr(config, "pool_bytes")).startswith("pool_bytes: cannot be deleted")
    assert config == OffloadConfig(**NVME)


def test_copies_are_equal_and_hash_alike() -> None:
    config = OffloadConfig(**NVME, aio={"thread_count": 2}, gradient_accumulation_steps=4)
    copies = [pickle.loads(pickle.dumps(config, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    copies += [copy.copy(config), copy.deepcopy(config), config.model_copy(), config.model_copy(deep=True)]
    for other in copies:
        assert other == config
        assert other is not config
        assert hash(other) == hash(config)
        assert other.model_fields_set == config.model_fields_set
    assert weakref.ref(config)() is config


def test_errors_can_be_pickled() -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(foo=1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_copy_with_changes_is_checked() -> None:
    config = OffloadConfig(**NVME, pool_bytes="2GiB")
    other = config.model_copy(update={"aio": {"queue_depth": 8}})
    assert (other.pool_bytes, other.aio.queue_depth, config.aio.queue_depth) == (2 << 30, 8, 32)
    assert "pool_bytes" in other.model_fields_set
    assert "verify" not in other.model_fields_set
    assert error_of(lambda: config.model_copy(update={"pool_bytes": 1})).startswith("pool_bytes: 1B is too small")
    assert error_of(lambda: config.model_copy(update={"nvme_path": None})).startswith("nvme_path: null")
    aio = AioConfig(intra_op_parallelism=2).model_copy(update={"thread_count": 3})
    assert aio.intra_op_parallelism == 3


def test_path_can_be_replaced() -> None:
    config = OffloadConfig(**NVME)
    other = config.with_nvme_path("/other")
    assert other.nvme_path == Path("/other")
    assert other.offload_optimizer == config.offload_optimizer
    assert config.nvme_path == Path("/local_nvme")


@pytest.mark.parametrize(
    "values",
    [
        {},
        NVME,
        {
            **NVME,
            "pool_bytes": 3 * (64 << 20) + 4097,
            "aio": {"backend": "threads", "thread_count": 2, "block_size": 12288, "overlap_events": False},
            "offload_optimizer": {"device": "nvme", "master_weights": True, "resident_bytes": 4097},
            "gradient_accumulation_steps": 7,
        },
    ],
    ids=["defaults", "nvme", "all"],
)
def test_what_is_written_reads_back_equal(values: dict[str, Any], tmp_path: Path) -> None:
    config = OffloadConfig(**values)
    assert OffloadConfig.model_validate(config.model_dump()) == config
    assert OffloadConfig.model_validate(config.model_dump(mode="json")) == config
    assert OffloadConfig.model_validate_json(config.model_dump_json()) == config
    (tmp_path / "a.yaml").write_text(config.to_yaml())
    assert OffloadConfig.load(tmp_path / "a.yaml") == config
    (tmp_path / "a.json").write_text(config.model_dump_json())
    assert OffloadConfig.load(tmp_path / "a.json") == config


def test_yaml_has_sizes_with_units() -> None:
    assert yaml.safe_load(OffloadConfig().to_yaml())["pool_bytes"] == "1GiB"


# --- Files ---


@pytest.mark.parametrize("name", ["a.yaml", "a.yml", "a.json"])
def test_file_is_loaded(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({"$schema": "schema.json", **NVME}))  # JSON is YAML too
    assert OffloadConfig.load(path) == OffloadConfig(**NVME)
    assert OffloadConfig.load(str(path), nvme_path="/other").nvme_path == Path("/other")


def test_path_may_come_from_outside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("offload_optimizer: {device: nvme}\n")
    assert "nvme_path: null is not enough" in error_of(lambda: OffloadConfig.load(path))
    assert OffloadConfig.load(path, nvme_path=tmp_path).nvme_path == tmp_path


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "", "the file is empty"),
        ("a.yaml", " \n\n", "the file is empty"),
        ("a.json", "", "the file is empty"),
        ("a.yaml", "# only a comment\n", "the file holds comments only"),
        ("a.yaml", "- a\n- b\n", r"\['a', 'b'\] is not a mapping"),
        ("a.json", "[1]", r"\[1\] is not a mapping"),
        ("a.yaml", "just text", "'just text' is not a mapping"),
        ("a.yaml", "pool_bytes: 1GiB\naio: {backend: [\n", "line 3, column 1: not valid YAML: "),
        ("a.yaml", "aio:\n\tbackend: aio\n", "line 2, column 1: not valid YAML: "),
        ("a.yaml", "a: 1\n--- \nb: 1\n", "line 2, column 1: not valid YAML: "),
        ("a.yaml", "a: \x01", "not valid YAML: "),
        ("a.yaml", "a: !!python/name:os.system\n", "line 1, column 4: not valid YAML: could not determine"),
        (
            "a.yaml",
            "pool_bytes: 1GiB\npool_bytes: 2GiB\n",
            "line 2, column 1: not valid YAML: key 'pool_bytes' is given",
        ),
        (
            "a.yaml",
            "aio:\n  queue_depth: 1\n  queue_depth: 2\n",
            "line 3, .*'queue_depth' is given twice, first on line 2",
        ),
        ("a.json", '{"aio": 1,}', "line 1, column .*: not valid JSON"),
        ("a.json", '{"aio": {}, "aio": {}}', "key 'aio' is given twice"),
        ("a.yaml", "1: 2\n", "1: unknown key"),
        ("a.yaml", "aio:\n  on: 2\n", "aio.True: unknown key"),
        ("a.yaml", "offload_optimizer: {devise: 1}\n", "offload_optimizer.devise: unknown key; did you mean 'device'?"),
        ("a.yaml", "aio: &a {queue_depth: *a}\n", "aio.queue_depth: "),
        ("a.yaml", "{a: " * 5000, "not a config: nested too deeply"),
        ("a.toml", "x = 1", "a config file's name ends in .yaml, .yml or .json, not in '.toml'"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = error_of(lambda: OffloadConfig.load(path))
    assert re.search(f"^{re.escape(str(path))}: {message}", found)


def test_missing_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "optimizer_nvme.yaml").write_text("aio: {}\n")
    message = error_of(lambda: OffloadConfig.load(tmp_path / "optimiser_nvme.yaml"))
    assert message.startswith(f"{tmp_path / 'optimiser_nvme.yaml'}: there is no such file; did you mean ")
    assert message.endswith(f"'{tmp_path / 'optimizer_nvme.yaml'}'?")
    assert "nor a directory" in error_of(lambda: OffloadConfig.load(tmp_path / "no" / "a.yaml"))


def test_directory_and_bytes_are_no_config(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").mkdir()
    assert "cannot be read: Is a directory" in error_of(lambda: OffloadConfig.load(tmp_path / "a.yaml"))
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\n")
    assert "save it as UTF-8" in error_of(lambda: OffloadConfig.load(tmp_path / "b.yaml"))
    assert "not a path" in error_of(lambda: OffloadConfig.load("a\0.yaml"))


def test_every_line_of_a_file_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("foo: 1\nbar: 2\n")
    lines = error_of(lambda: OffloadConfig.load(path)).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{path}: ") for line in lines)


def test_yaml_anchors_and_merges_work(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("offload_optimizer: &o {device: cpu}\naio:\n  <<: {queue_depth: 4}\n  queue_depth: 8\n")
    config = OffloadConfig.load(path)
    assert config.aio.queue_depth == 8
    assert config.offload_optimizer.device == "cpu"


def test_heading_without_settings_is_default(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("aio:\n  # queue_depth: 4\noffload_optimizer:\n")
    assert OffloadConfig.load(path) == OffloadConfig()


# --- The files in config/ ---


def test_there_is_a_file_for_each_situation() -> None:
    names = {path.stem for path in CONFIG_FILES}
    assert names == {
        "container",
        "dgx",
        "everything_nvme",
        "laptop_cpu",
        "none",
        "optimizer_cpu",
        "optimizer_nvme",
        "optimizer_nvme_fp32",
        "several_drives",
        "tiny",
    }


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_file_of_config_loads(path: Path) -> None:
    config = OffloadConfig.load(path)
    assert (config.nvme_path is not None) == (config.offload_optimizer.device == "nvme")


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_file_of_config_says_hardware_command_and_schema(path: Path) -> None:
    lines = path.read_text().splitlines()
    head = "\n".join(line for line in lines[:5] if line.startswith("#"))
    assert lines[0].startswith("# Hardware: ")
    example = "train_xl" if path.stem == "everything_nvme" else "train_gpt"
    assert f"# Command:  python examples/{example}.py --config config/{path.name}" in head
    assert "# yaml-language-server: $schema=schema.json" in head


def test_schema_file_is_up_to_date() -> None:
    stored = json.loads((ROOT / "config" / "schema.json").read_text())
    assert stored == json_schema(), "run `python -m swapper.config --schema config/schema.json`"


def test_schema_names_every_key_of_every_file() -> None:
    schema = json_schema()
    for path in CONFIG_FILES:
        for key, value in yaml.safe_load(path.read_text()).items():
            field = schema["properties"][key]
            if isinstance(value, dict):
                section = schema["$defs"][field["$ref"].rpartition("/")[2]]
                assert set(value) <= set(section["properties"])


def docstrings(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Dotted name of each setting to its docstring."""
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= docstrings(field.annotation, f"{name}.")
        else:
            found[prefix + name] = " ".join((field.description or "").split())
    return found


def test_every_setting_says_its_default() -> None:
    texts = docstrings(OffloadConfig)
    assert len(texts) == 28
    assert {name for name, text in texts.items() if "efault" not in text} == set()


def test_schema_is_printed_and_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swapper.config", "--schema"]
    printed = run_program(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed) == json_schema()
    run_program([*command, str(tmp_path / "s.json")], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "s.json").read_text() == printed


def test_files_know_the_classes_by_their_public_names() -> None:
    """A config that was pickled, as hyperparameters are, is found by these names, also by `weights_only`."""
    sections = [value for value in vars(swapper.config).values() if hasattr(value, "model_fields")]
    assert swapper.OffloadConfig in sections
    assert {each.__module__ for each in sections} == {"swapper.config"}
    config = swapper.OffloadConfig(nvme_path="/drive")
    assert b"swapper.config\n" in pickle.dumps(config, protocol=0)
    assert pickle.loads(pickle.dumps(config)) == config
