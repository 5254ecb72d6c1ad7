"""`swapper.save` of state dicts whose values are on disk: torch's bytes, one tensor in memory at a time."""

from __future__ import annotations

import io
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import without_id
from launcher import run_program
from models import CASES, WIDTH, Llama, Mlp, loss_of, tokens, vectors
from repository import BENCHMARK
from still_drive import still
from twins import Run, adamw, bits, close, offloaded, run_twice, swapper_of

import swapper
from swapper.files.file_buffers import POOL_BYTES
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.storage.store import TensorStore
from swapper.tensors.evicted_views import EvictedView

SMALL_POOL = 1 << 18


def saved_bytes(run: Run, state: Any, path: Path) -> bytes:
    """The file: of torch for the plain model, ours for the swapped one."""
    if run.swapped:
        swapper.save(state, path, pool_bytes=SMALL_POOL)
        assert not swapper_of(run.model)._copies._copies, "it was copied to a mapped file"
        return path.read_bytes()
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.long
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_the_file_is_that_of_the_plain_model(name: str, nvme_path: Path, tmp_path: Path) -> None:
    case = CASES[name]

    def program(run: Run) -> None:
        loss_of(run, case.inputs).backward()
        run.optimizer.step()
        data = saved_bytes(run, {"model": run.model.state_dict(), "step": 1}, tmp_path / "x")
        if torch.__version__ >= "2.13":  # Older ones have their small records in another order.
            run.note("file", without_id(data))
        run.note("loaded", dict(torch.load(io.BytesIO(data))["model"]))

    run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes, watch=False)


def test_tied_parameters_and_parts_of_them_share_their_bytes(nvme_path: Path, tmp_path: Path) -> None:
    def program(run: Run) -> None:
        loss_of(run, tokens).backward()
        run.optimizer.step()
        state = run.model.state_dict()
        first = next(tensor for tensor in state.values() if tensor.dim() == 2)
        parts = {"whole": dict(state), "again": first, "row": first[1], "box": first[2:4, 3:], "flat": first.view(-1)}
        data = saved_bytes(run, parts, tmp_path / "x")
        if torch.__version__ >= "2.13":
            run.note("file", without_id(data))
        loaded = torch.load(io.BytesIO(data))
        assert len({loaded[name].untyped_storage().data_ptr() for name in ("again", "row", "box", "flat")}) == 1
        run.note("loaded", loaded)

    run_twice(nvme_path, partial(Llama, tied=True), program)


def test_a_state_dict_whose_model_is_gathered_or_closed_is_saved(nvme_path: Path, tmp_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(4)), adamw(m)), spare_bytes=1 << 20)
    state = model.state_dict()
    assert all(type(tensor) is EvictedView for tensor in state.values())
    with swapper.gathered(model), torch.no_grad():
        for p in model.parameters():
            p.add_(1)
        expected = [bits(p) for p in model.parameters()]
        swapper.save(state, tmp_path / "gathered")
    close(model, optimizer)
    swapper.save(state, tmp_path / "closed")
    for name in ("gathered", "closed"):
        assert [bits(tensor) for tensor in torch.load(tmp_path / name).values()] == expected


def test_in_the_background_the_values_are_those_of_the_call(nvme_path: Path, tmp_path: Path) -> None:
    def program(run: Run) -> None:
        def step() -> None:
            loss_of(run, vectors).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

        step()
        if run.swapped:
            plan = FaultPlan()
            with AsyncIOHandle(block_bytes=1 << 16, queue_depth=2, faults=plan) as handle:
                options: dict[str, Any] = {"pool_bytes": SMALL_POOL, "handle": handle, "background": True}
                with still(plan):
                    saving = swapper.save(run.model.state_dict(), tmp_path / "x", **options)
                    assert not saving.done()
                    step()
                saving.wait()
            run.note("saved", dict(torch.load(tmp_path / "x")))
        else:
            saved = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
            step()
            run.note("saved", saved)

    run_twice(nvme_path, lambda: Mlp(16), program)


def test_a_full_drive_of_the_model_is_no_reason_to_fail(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(16)), adamw(m)))

    def full(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        swapper.save(model.state_dict(), tmp_path / "x")
        with pytest.raises(swapper.SwapIOError, match="scratch file"):
            swapper.save(model.state_dict(), tmp_path / "y", background=True)
    assert not list(tmp_path.glob("y")) and not list(tmp_path.glob(".swapper*"))
    loaded = torch.load(tmp_path / "x")
    assert all(bits(tensor) == bits(loaded[name]) for name, tensor in model.state_dict().items())
    close(model, optimizer)


def test_a_failing_drive_of_the_model_leaves_the_old_file(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(16)), adamw(m)))
    torch.save(1, tmp_path / "x")
    read, reads = TensorStore.read, 0

    def fail(store: TensorStore, *arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads == 5:
            raise swapper.SwapIOError(5, "read", "record")
        return read(store, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TensorStore, "read", fail)
        with pytest.raises(swapper.SwapIOError, match="record"):
            swapper.save(model.state_dict(), tmp_path / "x")
    assert torch.load(tmp_path / "x") == 1 and not list(tmp_path.glob(".swapper*"))
    swapper.save(model.state_dict(), tmp_path / "x")
    loaded = torch.load(tmp_path / "x")
    assert all(bits(tensor) == bits(loaded[name]) for name, tensor in model.state_dict().items())
    close(model, optimizer)


def test_a_parameter_that_was_given_another_shape_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(4)), adamw(m)), spare_bytes=1 << 20)
    state = model.state_dict()
    with swapper.gathered(model):
        p = next(model.parameters())
        before = p.data
        p.data = torch.zeros(WIDTH, 2)
        with pytest.raises(swapper.SwapError, match=r"0\.weight of .* was given other data since, \(48, 2\)"):
            swapper.save(state, tmp_path / "x")
        p.data = torch.zeros(WIDTH, WIDTH).t()
        with pytest.raises(swapper.SwapError, match="another order in memory"):
            swapper.save(state, tmp_path / "x")
        p.data = before
    assert not list(tmp_path.glob("x")) and not list(tmp_path.glob(".swapper*"))
    swapper.save(state, tmp_path / "x")
    close(model, optimizer)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.unsanitized("its memory counts as the process's")
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_saving_a_model_and_its_optimizer_holds_the_pool(nvme_path: Path, tmp_path: Path, background: bool) -> None:
    program = f"""
import sys, time, torch, swapper
from torch import nn
sys.path.insert(0, {str(BENCHMARK.parent)!r})
from peak import Peak
config = swapper.OffloadConfig(nvme_path={str(nvme_path)!r}, pool_bytes="48MiB", bucket_bytes="4MiB",
                               offload_param={{"device": "nvme"}}, offload_optimizer={{"device": "nvme"}})
with swapper.init(config):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024)) for _ in range(60)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
swapper.offload(model, optimizer, config)
model(torch.randn(1, 1024)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.swapper.flush()
swapper.save(torch.zeros(3), {str(tmp_path / "small")!r})
def grown(name, state):
    with Peak() as before:
        time.sleep(0.05)
    with Peak() as peak:
        saving = swapper.save(state(), {str(tmp_path)!r} + "/" + name, background={background})
        if saving is not None:
            saving.wait()
    return peak.bytes - before.bytes
print(grown("model.pt", model.state_dict), grown("optimizer.pt", optimizer.state_dict))
"""
    output = run_program([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    of_model, of_optimizer = map(int, output.split())
    assert (tmp_path / "model.pt").stat().st_size > 250e6
    assert (tmp_path / "optimizer.pt").stat().st_size > 500e6
    assert of_model <= POOL_BYTES + 100e6
    assert of_optimizer <= POOL_BYTES + 100e6
