"""`swapper tune`, the files of its sweeps, and the config that it prints or writes."""

from __future__ import annotations

import itertools
import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
import yaml
from command import swapper
from measuring import SIZE
from typer.main import get_command

from swapper.bench.measure import Figure, Timing
from swapper.bench.sweep import default_sweep, demand, load_sweep, setting_name
from swapper.bench.witness import Proof
from swapper.cli import app, config_file, tune
from swapper.cli.config_file import aio_yaml, check_config_file, write_aio
from swapper.cli.deepspeed_flags import BenchCommand, TuneCommand, translated
from swapper.config import AioConfig, OffloadConfig
from swapper.errors import ConfigError, SwapError

pytestmark = pytest.mark.timeout(240)


# --- swapper tune --------------------------------------------------------------------------------------------------

QUICK = ["--io-size", "8MiB", "--loops", "1"]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.json"
    path.write_text('{"block_size": ["512K", "1M"], "queue_depth": [2, 8], "overlap_events": [true, false]}')
    return path


def test_the_output_of_tune_is_a_config(leaves_nothing_on: Path, sweep: Path, tmp_path: Path) -> None:
    result = swapper("tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", sweep, *QUICK)
    config = tmp_path / "config.yaml"
    config.write_text(result.stdout)
    assert set(yaml.safe_load(result.stdout)) == {"aio"}
    aio = OffloadConfig.load(config).aio
    assert aio in load_sweep(sweep)
    assert yaml.safe_load(result.stdout)["aio"].keys() == AioConfig.model_fields.keys()
    assert "chosen" in result.stderr


def test_tune_takes_the_flags_of_deepspeed(leaves_nothing_on: Path, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text('{"block_size": ["1M"], "io_parallel": [1], "sequential_requests": [true, false]}')
    logs = tmp_path / "logs"
    arguments = ["--sweep_config", path, "--io_size=8M", "--loops", 1, "--no_read", "--flush_page_cache"]
    directories = [tempfile.mkdtemp(dir=leaves_nothing_on) for _ in range(2)]
    swapper("tune", "--nvme_dir", *directories, *arguments, "--log_dir", logs, "--verbose")
    summary = json.loads((logs / "summary.json").read_text())
    assert summary["directories"] == directories
    assert summary["io_size_bytes"] == 8 << 20
    assert [setting["overlap_events"] for setting in summary["settings"]] == [False, True]
    assert not list(logs.glob("read-*"))
    for directory in directories:
        os.rmdir(directory)


DS_IO = {
    "--folder /a": ["--dir", "/a"],
    "--folder=/a": ["--dir", "/a"],
    "--folder_to_device_mapping /a:0 /b:1": ["--dir", "/a", "--dir", "/b"],
    "--io_size 1G --block_size 512K --queue_depth 8 --io_parallel 2": [
        *["--size", "1GiB", "--block-size", "512KiB", "--queue-depth", "8", "--threads", "2"]
    ],
    "--gpu --use_gds --read": ["--device", "cuda", "--gds", "--read"],
    "--dir /a /b --loops 3": ["--dir", "/a", "--dir", "/b", "--loops", "3"],
    "--loops": ["--loops"],
}


@pytest.mark.parametrize("flags", DS_IO)
def test_bench_takes_the_flags_of_ds_io(flags: str) -> None:
    assert translated(BenchCommand.flags, flags.split())[0] == DS_IO[flags]


def test_every_flag_of_deepspeed_is_taken_or_said() -> None:
    of_io = (
        "--folder=x --folder_to_device_mapping=x:1 --io_size=1M --fast_io_size=1M --read --multi_process=2 "
        "--block_size=1M --queue_depth=2 --single_submit --sequential_requests --validate --engine=aio_handle "
        "--loops=1 --io_parallel=1 --gpu --use_gds --slow_bounce_buffer --torch_legacy_save "
        "--use_accelerator_pin_memory --warmup_loops=1 --include_warmup_time --different_file_each_iteration"
    )
    of_tune = (
        "--nvme_dir=x --sweep_config=x --no_read --no_write --io_size=1M --gpu --gds --flush_page_cache --log_dir=x "
        "--loops=1 --verbose"
    )
    for command, flags in ((BenchCommand, of_io), (TuneCommand, of_tune)):
        name = "bench" if command is BenchCommand else "tune"
        known = {option for p in get_command(app).commands[name].params for option in (*p.opts, *p.secondary_opts)}
        for flag in flags.split():
            ours, said = translated(command.flags, [flag])
            assert said or ours
            assert {argument.partition("=")[0] for argument in ours if argument.startswith("--")} <= known
            if "=" in flag and not ours:  # Its value is not taken for something else when it stands alone.
                assert translated(command.flags, flag.split("=")) == (ours, said)


def test_a_flag_without_meaning_is_said(leaves_nothing_on: Path) -> None:
    result = swapper("bench", "--folder", leaves_nothing_on, "--validate", "--engine", "torch_io", "--size", 1, code=2)
    assert "bench: --validate has no effect: every figure comes with a proof" in result.stderr
    assert "bench: --engine has no effect: " in result.stderr


def test_tune_writes_a_new_config(leaves_nothing_on: Path, sweep: Path, tmp_path: Path) -> None:
    for name in ("new.yaml", "new.json"):
        config = tmp_path / name
        result = swapper(
            "tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", sweep, *QUICK, "--write-config", config
        )
        loaded = OffloadConfig.load(config)
        assert loaded.nvme_path == leaves_nothing_on
        assert loaded.aio.model_dump(mode="json") == yaml.safe_load(result.stdout)["aio"]


def test_tune_logs_every_setting_and_a_summary(leaves_nothing_on: Path, sweep: Path, tmp_path: Path) -> None:
    logs = tmp_path / "a" / "logs"
    swapper(
        *["tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", sweep, "--io-size", "8MiB", "--loops", 2],
        *["--log-dir", logs, "--no-write", "--verbose"],
    )
    settings = load_sweep(sweep)
    names = {f"read-{setting_name(setting)}.json" for setting in settings}
    assert {path.name for path in logs.iterdir()} == {*names, "summary.json"}
    assert len(names) == 8
    one = json.loads((logs / min(names)).read_text())
    assert len(one["runs"]) == 2
    assert one["directories"] == [str(leaves_nothing_on)]
    summary = json.loads((logs / "summary.json").read_text())
    assert AioConfig(**summary["chosen"]) in settings
    assert len(summary["settings"]) == 8
    assert all(setting["read_bps"] and "write_bps" not in setting for setting in summary["settings"])


@pytest.mark.long
def test_tune_of_two_directories_uses_both(leaves_nothing_on: Path, sweep: Path, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir=leaves_nothing_on) as one,
        tempfile.TemporaryDirectory(dir=leaves_nothing_on) as two,
    ):
        swapper(
            *["tune", "--nvme-dir", one, "--nvme-dir", two, "--sweep-config", sweep, *QUICK, "--log-dir", tmp_path],
            *["--flush-page-cache"],
        )
    logged = json.loads(next(tmp_path.glob("read-*.json")).read_text())
    assert logged["directories"] == [one, two]
    assert logged["moved_bytes"] == 2 * SIZE


def test_a_setting_that_the_machine_refuses_is_named_and_left_out(
    leaves_nothing_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swapper.io import host_handle

    refused = tuple(
        found._replace(available=False, reason="not today") if found.backend == "aio" else found
        for found in host_handle.probe()
    )
    monkeypatch.setattr(host_handle, "probe", lambda: refused)
    path = tmp_path / "sweep.yaml"
    path.write_text("backend: [aio, threads]\n")
    result = swapper("tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", path, *QUICK)
    assert "no figure for aio-1MiB-d32-t1: the I/O backend 'aio' is not available here: aio: not today" in result.stderr
    assert yaml.safe_load(result.stdout)["aio"]["backend"] == "threads"
    path.write_text("backend: aio\n")
    error = swapper("tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", path, *QUICK, code=1).stderr
    assert "there is no figure for any setting" in error


def test_tune_in_memory_is_refused(memory: Path, sweep: Path) -> None:
    result = swapper("tune", "--nvme-dir", memory, "--sweep-config", sweep, *QUICK, code=1)
    assert "which is memory" in result.stderr
    assert result.stdout == ""


def scored(setting: AioConfig, read_bps: float, write_bps: float) -> tune.Score:
    figures = []
    for operation, bps in (("read", read_bps), ("write", write_bps)):
        figure = Figure(setting_name(setting), operation, 10**9, ("d",))  # type: ignore[arg-type]
        figure.timings.append(Timing(10**9 / bps, 0.0, 0))
        figure.proofs.append(Proof(""))
        figures.append(figure)
    return tune.Score(setting, figures)


def test_the_score_is_the_time_to_read_and_write_the_same() -> None:
    assert scored(AioConfig(), 1e9, 3e9).bandwidth_bps == pytest.approx(1.5e9)


def test_the_least_demanding_setting_within_the_noise_is_chosen() -> None:
    fastest = scored(AioConfig(queue_depth=128, intra_op_parallelism=4), 3.0e9, 3.0e9)
    near = scored(AioConfig(queue_depth=32), 2.95e9, 2.95e9)
    nearer_but_deeper = scored(AioConfig(queue_depth=64), 2.99e9, 2.99e9)
    slow = scored(AioConfig(queue_depth=8), 2.9e9, 2.9e9)
    scores = [fastest, near, nearer_but_deeper, slow]
    for order in itertools.permutations(scores):
        assert tune.choose(order) is near
    near.figures[0].error = "no proof"
    assert tune.choose(scores) is nearer_but_deeper


def test_no_figure_at_all_is_an_error() -> None:
    score = scored(AioConfig(), 1e9, 1e9)
    score.figures[1].error = "the page cache"
    with pytest.raises(SwapError, match="no figure for any setting: the page cache"):
        tune.choose([score])


def test_demand_counts_threads_before_bytes_before_requests() -> None:
    order = [
        AioConfig(block_size="4MiB", queue_depth=8),
        AioConfig(block_size="1MiB", queue_depth=32),
        AioConfig(block_size="1MiB", queue_depth=32, single_submit=True),
        AioConfig(block_size="1MiB", queue_depth=64),
        AioConfig(block_size="4KiB", queue_depth=1, intra_op_parallelism=2),
    ]
    assert all(sorted(some, key=demand) == order for some in itertools.permutations(order))


def test_the_default_sweep_is_short_and_distinct() -> None:
    settings = default_sweep()
    assert 4 <= len(settings) <= 48
    assert len({setting_name(setting) for setting in settings}) == len(settings)


# --- Sweep files ---------------------------------------------------------------------------------------------------


def test_a_sweep_file_for_deepspeed_is_accepted_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(
        '{"block_size": ["128K", "1M", "8M"], "queue_depth": [32, 128], "io_parallel": [1, 8], '
        '"overlap_events": [true, false], "single_submit": [false]}'
    )
    settings = load_sweep(path)
    assert len(settings) == 3 * 2 * 2 * 2
    assert {setting.block_size for setting in settings} == {128 << 10, 1 << 20, 8 << 20}
    assert {setting.intra_op_parallelism for setting in settings} == {1, 8}
    assert all(setting.overlap_events in (True, False) and setting.single_submit is False for setting in settings)


def test_a_sweep_file_may_be_yaml_with_single_values_and_repetitions(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("block_size: [1MiB, 1048576, 1M]\nqueue_depth: 7\nbackend: [threads, auto]\n")
    assert load_sweep(path) == [
        AioConfig(block_size=1 << 20, queue_depth=7, backend="threads"),
        AioConfig(block_size=1 << 20, queue_depth=7, backend="auto"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.json", "{}", "there is nothing to try"),
        ("s.json", "", "the file is empty"),
        ("s.json", "[1]", "is not a mapping"),
        ("s.json", '{"queue_depth": [1', "not valid JSON"),
        ("s.yaml", "a: b: c", "not valid YAML"),
        ("s.json", '{"depth": [1]}', "depth: unknown key"),
        ("s.json", '{"queue_depth": []}', "queue_depth: [] is not a list of values to try"),
        ("s.json", '{"queue_depth": {"from": 1}}', "is not a list of values to try"),
        ("s.json", '{"queue_depth": [8, 0]}', "queue_depth: 0 is not allowed; write a whole number from 1 to 4096"),
        ("s.json", '{"io_parallel": [65]}', "io_parallel: 65 is not allowed"),
        ("s.json", '{"io_parallel": [1], "intra_op_parallelism": [2]}', "another name of 'intra_op_parallelism'"),
        ("s.json", '{"block_size": ["1000"]}', "block_size: 1000 bytes"),
        ("s.json", '{"block_size": ["1.5M"]}', "can mean two sizes"),
        ("s.json", '{"block_size": [true]}', "True is not a size"),
        ("s.json", '{"overlap_events": ["yes"]}', "overlap_events: 'yes' is not a switch"),
        ("s.json", '{"backend": ["buffered"]}', "backend: 'buffered' is not one of auto, uring, aio, threads"),
    ],
)
def test_a_bad_sweep_file_is_refused_by_name(
    leaves_nothing_on: Path, tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    assert message in str(caught.value)
    assert all(line.startswith(str(path)) for line in str(caught.value).splitlines())
    assert str(path) in swapper("tune", "--nvme-dir", leaves_nothing_on, "--sweep-config", path, code=1).stderr


def test_every_bad_value_of_a_sweep_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text('{"queue_depth": [0, 8, -1], "block_size": ["100"], "nonsense": 1}')
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    assert len(str(caught.value).splitlines()) == 4


# --- The aio section of a config -----------------------------------------------------------------------------------

TUNED = AioConfig(block_size="4MiB", queue_depth=8, intra_op_parallelism=2, backend="threads")

BEFORE = """\
# My run.
nvme_path: /mnt/nvme   # the fast one

pool_bytes: 2GiB
{aio}
# What is offloaded.
offload_optimizer:
  device: nvme  # all of it
"""


@pytest.mark.parametrize(
    "aio",
    [
        "",
        "aio:",
        "aio: {}",
        "aio: {queue_depth: 3}  # short",
        "aio:\n  queue_depth: 3\n  backend: aio",
        "aio:\n  # deep\n  queue_depth: 3  # three",
        'aio: {\n  "queue_depth": 3\n}',
        '"aio":\n  block_size: >-\n    1MiB',
    ],
    ids=["absent", "empty", "flow-empty", "flow", "block", "comments", "flow-over-lines", "folded"],
)
def test_the_aio_section_is_replaced_and_the_rest_kept_to_the_character(tmp_path: Path, aio: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(BEFORE.format(aio=aio))
    path.chmod(0o640)
    check_config_file(path, [])
    assert path.read_text() == BEFORE.format(aio=aio), "a check changes nothing"
    write_aio(path, TUNED, [])
    new = aio_yaml(TUNED).rstrip("\n")
    assert path.read_text() == (BEFORE.format(aio=new) if aio else BEFORE.format(aio="") + new + "\n")
    loaded = OffloadConfig.load(path)
    assert loaded.aio == TUNED
    assert loaded.pool_bytes == 2 << 30
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_the_last_section_without_a_line_end_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text("pool_bytes: 2GiB\naio:\n  queue_depth: 3")
    write_aio(path, TUNED, [])
    assert path.read_text() == "pool_bytes: 2GiB\n" + aio_yaml(TUNED)
    path.write_text("pool_bytes: 2GiB")
    write_aio(path, TUNED, [])
    assert path.read_text() == "pool_bytes: 2GiB\n" + aio_yaml(TUNED)


def test_a_json_config_keeps_its_other_values(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"$schema": "schema.json", "pool_bytes": "2GiB", "aio": {"queue_depth": 3}}')
    write_aio(path, TUNED, [])
    written = json.loads(path.read_text())
    assert written == {"$schema": "schema.json", "pool_bytes": "2GiB", "aio": TUNED.model_dump(mode="json")}
    assert OffloadConfig.load(path).aio == TUNED


def test_a_link_to_a_config_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("pool_bytes: 2GiB\n")
    link = tmp_path / "link.yaml"
    link.symlink_to("real.yaml")
    write_aio(link, TUNED, [])
    assert link.is_symlink()
    assert OffloadConfig.load(tmp_path / "real.yaml").aio == TUNED


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "{pool_bytes: 2GiB}\n", "only a file with a setting on each line"),
        ("c.yaml", "pool_bites: 2GiB\n", "unknown key; did you mean 'pool_bytes'?"),
        ("c.yaml", "aio: {queue_depth: 0}\n", "aio.queue_depth: 0 is not allowed"),
        ("c.yaml", "# nothing\n", "comments only"),
        ("c.toml", "", "ends in .yaml, .yml or .json"),
        ("no/c.yaml", None, "no file can be written there"),
    ],
    ids=["flow", "unknown-key", "bad-aio", "comments-only", "toml", "no-directory"],
)
def test_a_config_that_cannot_be_changed_is_refused_before_measuring(
    leaves_nothing_on: Path, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    error = swapper("tune", "--nvme-dir", leaves_nothing_on, *QUICK, "--write-config", path, code=1).stderr
    assert message in error
    assert (path.read_text() if path.exists() else None) == text


def test_an_aio_section_that_others_refer_to_is_not_cut_out(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = "aio: &mine\n  queue_depth: 3\noffload_param:\n  resident_bytes: 0\ncheckpoint: {keep_last: null}\n"
    path.write_text(text)
    write_aio(path, TUNED, [])
    assert OffloadConfig.load(path).aio == TUNED
    text = "offload_param: &none {}\naio: *none\n"
    path.write_text(text)
    write_aio(path, TUNED, [])
    assert path.read_text() == "offload_param: &none {}\n" + aio_yaml(TUNED)
    text = "aio: &none {}\noffload_param: *none\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        write_aio(path, TUNED, [])
    assert path.read_text() == text


def test_a_change_of_anything_else_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("pool_bytes: 2GiB\n")
    monkeypatch.setattr(config_file, "_with_section", lambda text, section, path: "pool_bytes: 3GiB\n" + section)
    with pytest.raises(ConfigError, match="cannot be replaced alone"):
        write_aio(path, TUNED, [])
    assert path.read_text() == "pool_bytes: 2GiB\n"
