"""`SwapStorageWriter` and `SwapStorageReader`: torch.distributed.checkpoint, in torch's own layout."""

from __future__ import annotations

import errno
import os
import pickle
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import isolation
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sampling import ALL, SEED
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.futures import Future

from swapper.errors import SwapIOError
from swapper.files.dcp import SwapStorageReader, SwapStorageWriter
from swapper.io.handle import AsyncIOHandle, FaultPlan

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled, unavailable or uninitialized.*"),
    pytest.mark.filterwarnings("ignore:.*Detected an existing checkpoint.*"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]

WRITERS = {"torch": FileSystemWriter, "swapper": SwapStorageWriter}
READERS = {"torch": FileSystemReader, "swapper": SwapStorageReader}


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    base = random(1000, 100)
    return {
        "weight": random(300, 7),
        "rows": base[10:20],
        "columns": base.t()[3:5],
        "bf16": random(1 << 19).bfloat16(),
        "scalar": random(1)[0],
        "empty": torch.empty(0, 3),
        "channels_last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nested": {"step": seed + 5, "names": ["a", ("b", None)], "exp_avg": [random(9), random(3, 3)]},
    }


def emptied(saved: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        return torch.full(saved.shape, 3, dtype=saved.dtype)
    if isinstance(saved, dict):
        return {key: emptied(value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(emptied(value) for value in saved)
    return None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def loaded(directory: Path, reader: str = "swapper", seed: int = 0, **options: Any) -> Any:
    target = emptied(state(seed))
    dcp.load(target, storage_reader=READERS[reader](directory, **options))
    return target


def names(directory: Path) -> list[str]:
    """Of the files, without what is random in them."""
    return sorted(re.sub("-[0-9a-f]{8}", "", entry.name) for entry in directory.iterdir())


def file_of(directory: Path) -> Path:
    """That of the only rank."""
    (path,) = directory.glob("__0_0*.distcp")
    return path


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_what_one_writes_the_other_reads(tmp_path: Path, writer: str, reader: str) -> None:
    dcp.save(state(), storage_writer=WRITERS[writer](tmp_path / "checkpoint"))
    assert same(loaded(tmp_path / "checkpoint", reader), state())
    assert names(tmp_path / "checkpoint") == [".metadata", "__0_0.distcp"]


def test_a_part_of_a_tensor_is_written_without_the_rest(tmp_path: Path) -> None:
    base = torch.randn(1000, 1000)
    dcp.save({"row": base[7], "column": base[:, 7]}, storage_writer=SwapStorageWriter(tmp_path))
    assert file_of(tmp_path).stat().st_size < 20_000
    target = {"row": torch.zeros(1000), "column": torch.zeros(1000)}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path))
    assert torch.equal(target["row"], base[7]) and torch.equal(target["column"], base[:, 7])


@pytest.mark.parametrize("reader", READERS)
def test_async_save(tmp_path: Path, reader: str, unused_gloo: None) -> None:
    live = state()
    saving = dcp.async_save(live, storage_writer=SwapStorageWriter(tmp_path / "checkpoint"))
    live["weight"].zero_()  # It was copied.
    assert saving is not None
    saving.result()  # type: ignore[union-attr]
    assert same(loaded(tmp_path / "checkpoint", reader), state())


@pytest.fixture
def unused_gloo(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_a_group(rank: int, world_size: int, directory: str, reader: str, saves: bool) -> bool:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous-{saves}-{reader}", rank=rank, world_size=world_size
    )
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        full = torch.arange(1001 * 6, dtype=torch.float32).reshape(1001, 6)
        mine = {"rank": rank}
        if saves:
            sharded = {"weight": distribute_tensor(full, mesh, [Shard(0)]), "replicated": torch.ones(5), "own": mine}
            dcp.save(sharded, storage_writer=SwapStorageWriter(f"{directory}/checkpoint"))
        target: dict[str, Any] = {
            "weight": distribute_tensor(torch.zeros_like(full), mesh, [Shard(1)]),
            "replicated": torch.zeros(5),
        }
        dcp.load(target, storage_reader=READERS[reader](f"{directory}/checkpoint"))
        assert isinstance(target["weight"], DTensor)
        return torch.equal(target["weight"].full_tensor(), full) and bool(target["replicated"].eq(1).all())
    finally:
        dist.destroy_process_group()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reader", READERS)
def test_two_processes_write_their_shards_and_read_others(tmp_path: Path, reader: str) -> None:
    processes = []
    for rank in range(2):
        receiver, sender = isolation._context.Pipe(duplex=False)
        process = isolation._context.Process(
            target=isolation._run, args=(sender, in_a_group, (rank, 2, str(tmp_path), reader, True))
        )
        process.start()
        sender.close()
        processes.append((process, receiver))
    try:
        for process, receiver in processes:
            assert receiver.poll(240), "still running"
            assert receiver.recv() == ("returned", True)
            process.join(240)
            assert process.exitcode == 0
    finally:
        for process, _ in processes:
            if process.is_alive():
                process.kill()
            process.join()
    assert names(tmp_path / "checkpoint") == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    # And in another number of processes.
    target = {"weight": torch.zeros(1001, 6)}
    dcp.load(target, storage_reader=READERS[reader](tmp_path / "checkpoint"))
    assert torch.equal(target["weight"], torch.arange(1001 * 6, dtype=torch.float32).reshape(1001, 6))


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    for seed in range(3):
        dcp.save(state(seed), storage_writer=SwapStorageWriter(tmp_path))
        for reader in READERS:
            assert same(loaded(tmp_path, reader, seed), state(seed))
        assert len(names(tmp_path)) == 2, "the files of the one before are gone"
    with pytest.raises((RuntimeError, CheckpointException), match="already exists"):
        dcp.save(state(3), storage_writer=SwapStorageWriter(tmp_path, overwrite=False))
    assert same(loaded(tmp_path, seed=2), state(2))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("nth", [1, 3, 6])
def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path: Path, nth: int, number: int) -> None:
    dcp.save(state(), storage_writer=SwapStorageWriter(tmp_path))
    before = {entry: entry.read_bytes() for entry in tmp_path.iterdir()}
    plan = FaultPlan(fail_write_at=nth, fail_errno=number)
    with AsyncIOHandle(block_bytes=1 << 18, faults=plan) as handle:
        writer = SwapStorageWriter(tmp_path, handle=handle, pool_bytes=1 << 18)
        with pytest.raises((SwapIOError, CheckpointException), match=os.strerror(number)):
            dcp.save(state(1), storage_writer=writer)
    assert {entry: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_a_save_whose_metadata_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=SwapStorageWriter(tmp_path))
    plan = FaultPlan()
    with AsyncIOHandle(block_bytes=4 << 20, faults=plan) as handle:
        dcp.save(state(1), storage_writer=SwapStorageWriter(tmp_path, handle=handle))
        metadata_write = plan.writes
        plan.fail_write_at = metadata_write
        with pytest.raises((SwapIOError, CheckpointException)):
            dcp.save(state(2), storage_writer=SwapStorageWriter(tmp_path, handle=handle))
    assert same(loaded(tmp_path, seed=1), state(1))
    dcp.save(state(3), storage_writer=SwapStorageWriter(tmp_path))
    assert same(loaded(tmp_path, seed=3), state(3))
    assert len(names(tmp_path)) == 2, "what the failed one had written is gone, too"


class Overtaken(SwapStorageWriter):
    """Another save into the directory is completed before this one is."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner)
        dcp.save(state(2), storage_writer=SwapStorageWriter(self.path))
        return results


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_of_two_saves_at_once_the_one_that_is_complete_first_is_loaded(tmp_path: Path, is_first: bool) -> None:
    if not is_first:
        dcp.save(state(), storage_writer=SwapStorageWriter(tmp_path))
    with pytest.raises((SwapIOError, CheckpointException), match=r"another save into this directory"):
        dcp.save(state(1), storage_writer=Overtaken(tmp_path))
    assert same(loaded(tmp_path, seed=2), state(2))
    dcp.save(state(3), storage_writer=SwapStorageWriter(tmp_path))
    assert same(loaded(tmp_path, seed=3), state(3))
    assert len(names(tmp_path)) == 2


def test_a_drive_that_fails_while_reading(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=SwapStorageWriter(tmp_path))
    with AsyncIOHandle(faults=FaultPlan(fail_read_at=1)) as handle:
        with pytest.raises((SwapIOError, CheckpointException), match="reported a failure"):
            loaded(tmp_path, handle=handle)
        assert same(loaded(tmp_path, handle=handle), state())


def test_damage_is_refused(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=SwapStorageWriter(tmp_path))
    path = file_of(tmp_path)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(state()["weight"].numpy().tobytes()) + 1000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises((SwapIOError, CheckpointException), match=r"__0_0-.*\.distcp.*|damaged"):
        loaded(tmp_path)
    path.write_bytes(whole[:-3000])
    with pytest.raises((SwapIOError, CheckpointException)):
        loaded(tmp_path)
    path.unlink()
    with pytest.raises((SwapIOError, CheckpointException), match="does not exist"):
        loaded(tmp_path)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_damaged_object_is_refused_by_its_name_wherever_the_damage_is(tmp_path: Path, writer: str) -> None:
    """A bit in a number of a pickle gives another number: only its checksum says so."""
    saved = {"step": 123456, "weight": torch.ones(5)}
    dcp.save(saved, storage_writer=WRITERS[writer](tmp_path))
    metadata, path = pickle.loads((tmp_path / ".metadata").read_bytes()), file_of(tmp_path)
    part = next(info for index, info in metadata.storage_data.items() if index.fqn == "step")
    whole = path.read_bytes()
    refused = 0
    for at in range(part.offset, part.offset + part.length):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        target = {"step": 0, "weight": torch.zeros(5)}
        try:
            dcp.load(target, storage_reader=SwapStorageReader(tmp_path))
            assert same(target, saved), at
        except (SwapIOError, CheckpointException) as error:
            cause = error if isinstance(error, SwapIOError) else error.failures[0][0]
            assert isinstance(cause, SwapIOError) and cause.errno == errno.EBADMSG, at
            assert cause.filename == str(path) and "'step' cannot be loaded" in str(cause)
            refused += 1
    assert refused > 300


class _NoRoom:
    def __reduce__(self) -> Any:
        return torch.empty, (1 << 60,)


def test_memory_that_is_short_is_not_called_damage(tmp_path: Path) -> None:
    dcp.save({"large": _NoRoom()}, storage_writer=SwapStorageWriter(tmp_path))
    with pytest.raises((RuntimeError, CheckpointException), match="allocate memory") as caught:
        dcp.load({"large": None}, storage_reader=SwapStorageReader(tmp_path))
    assert "Bad message" not in str(caught.value)


@pytest.mark.parametrize("damage", ["a part is smaller", "a part is missing", "no pickle", "another pickle", "empty"])
def test_damaged_metadata_is_refused_by_its_name(tmp_path: Path, damage: str) -> None:
    """Of a part that is smaller torch reads less, and leaves the rest of the tensor as it was."""
    dcp.save(state(), storage_writer=SwapStorageWriter(tmp_path))
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    chunks = metadata.state_dict_metadata["weight"].chunks
    if damage == "a part is smaller":
        chunks[0] = replace(chunks[0], sizes=torch.Size([299, 7]))
    else:
        chunks.clear()
    others = {"no pickle": b"\x80garbage", "another pickle": pickle.dumps([1]), "empty": b""}
    path.write_bytes(others.get(damage, pickle.dumps(metadata)))
    reason = "parts of 'weight' are not the whole" if damage.startswith("a part") else "no metadata of a checkpoint"
    with pytest.raises((SwapIOError, CheckpointException), match=rf"(?s){reason}.*\.metadata"):
        loaded(tmp_path)


@pytest.mark.long
def test_no_wrong_bit_in_the_metadata_loads_another_tensor(tmp_path: Path) -> None:
    """One bit of an offset makes it that of another tensor of the same shape, which its own checksum does not tell."""
    saved: dict[str, Any] = {f"w{k}": torch.full((112,), float(k)) for k in range(4)}
    dcp.save(saved, storage_writer=SwapStorageWriter(tmp_path))
    path = tmp_path / ".metadata"
    whole = path.read_bytes()
    metadata = pickle.loads(whole)
    places = {info.offset for info in metadata.storage_data.values()}
    assert any((one ^ other).bit_count() == 1 for one in places for other in places), "not a test of this"
    bits = random.Random(SEED).sample(range(8 * len(whole)), 3000 if ALL else 150)
    damage = [(bit // 8, 1 << bit % 8) for bit in bits]
    for at, flipped in damage:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ flipped]) + whole[at + 1 :])
        with pytest.raises((SwapIOError, CheckpointException), match=r"damaged.*\.metadata"):
            dcp.load(emptied(saved), storage_reader=SwapStorageReader(tmp_path))
    for cut in range(1, len(whole), 1 if ALL else 211):
        path.write_bytes(whole[:cut])
        target = emptied(saved)
        try:
            dcp.load(target, storage_reader=SwapStorageReader(tmp_path))
        except (SwapIOError, CheckpointException) as error:
            assert os.strerror(errno.EBADMSG) in str(error) and ".metadata" in str(error)
        else:
            assert same(target, saved)


def test_a_file_of_an_older_checkpoint_is_not_taken_for_that_of_a_newer_one(tmp_path: Path) -> None:
    """A copy over an older checkpoint that was cut off has files of both, of the same lengths."""
    for seed in (0, 1):
        dcp.save(state(seed), storage_writer=SwapStorageWriter(tmp_path / str(seed)))
    shutil.copy(tmp_path / "1" / ".metadata", tmp_path / "0")
    with pytest.raises((SwapIOError, CheckpointException), match=r"does not exist.*__0_0-.*\.distcp"):
        loaded(tmp_path / "0")


@pytest.mark.parametrize("name", ["../__0_0.distcp", "/etc/hostname", "a/b", ".."])
def test_a_path_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "checkpoint"
    dcp.save(state(), storage_writer=SwapStorageWriter(directory))
    with open(directory / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        info.relative_path = name
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises((SwapIOError, CheckpointException), match="not in the directory"):
        loaded(directory)


def test_shapes_that_differ_are_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(5)}, storage_writer=SwapStorageWriter(tmp_path))
    with pytest.raises((ValueError, CheckpointException), match=r"[Ss]ize"):
        dcp.load({"a": torch.ones(6)}, storage_reader=SwapStorageReader(tmp_path))


def test_files_with_extensions_of_torch_are_read_by_torch(tmp_path: Path) -> None:
    extensions = pytest.importorskip("torch.distributed.checkpoint._extension")
    if not hasattr(extensions, "ZStandard") or not extensions.ZStandard.is_available():
        pytest.skip("no extension is installed here")
    dcp.save({"a": torch.ones(5)}, storage_writer=FileSystemWriter(tmp_path, _extensions=[extensions.ZStandard()]))
    target = {"a": torch.zeros(5)}
    dcp.load(target, storage_reader=SwapStorageReader(tmp_path))
    assert target["a"].sum() == 5
