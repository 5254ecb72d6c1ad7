"""`model.state_dict()` of a model that the pool does not hold is what plain PyTorch gives, and costs no memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from launcher import run_program
from models import CASES, WIDTH, Gpt2, Llama, Mlp, loss_of, tokens, vectors
from repository import BENCHMARK
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from twins import Run, adamw, bits, close, config_for, facts_of, offloaded, run_twice, small_records, swapper_of

import swapper
from swapper.tensors.evicted import EvictedParameter
from swapper.tensors.evicted_views import EvictedView

DEPTH = 16
"""Of a model many times as long as the pool."""


def step(run: Run) -> None:
    loss_of(run, vectors).backward()
    run.finish_step()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_it_is_that_of_the_plain_model(name: str, nvme_path: Path) -> None:
    case = CASES[name]

    def program(run: Run) -> None:
        loss_of(run, case.inputs).backward()
        run.optimizer.step()
        state = run.model.state_dict()
        assert type(state) is OrderedDict
        run.note("metadata", dict(state._metadata))  # type: ignore[attr-defined]
        run.note("state", dict(state))
        run.note("facts", [(k, v.shape, v.dtype, v.stride(), v.requires_grad, v.is_leaf) for k, v in state.items()])
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        run.note("saved", dict(loaded))
        run.note("types", sorted({type(tensor).__name__ for tensor in loaded.values()}))
        shared = {key: tensor.untyped_storage().data_ptr() for key, tensor in loaded.items()}
        run.note("tied", [[key for key in shared if shared[key] == of] for of in shared.values()])
        run.note("copied", dict(copy.deepcopy(state)))
        run.note("loaded", str(run.model.load_state_dict(loaded)))

    run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes, watch=False)


@pytest.mark.long
def test_it_is_bounded_by_the_pool_in_no_way(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        state = run.model.state_dict()
        if run.swapped:
            assert all(type(tensor) is EvictedView for tensor in state.values())
            assert swapper_of(run.model)._cache.records.length_bytes < sum(p.nbytes for p in run.model.parameters()) / 2
        run.note("state", dict(state))
        for tensor in state.values():
            tensor.mul_(1.5)  # As moving averages are written.
        run.note_model("written")
        step(run)
        run.note("follows", dict(state))
        run.note("part", dict(run.model.blocks[3].state_dict()))  # type: ignore[index, operator, union-attr]
        run.note("prefixed", dict(run.model.state_dict(prefix="model.")))
        destination: OrderedDict[str, torch.Tensor] = OrderedDict()
        run.model.state_dict(destination=destination)
        run.note("into", dict(destination))

    run_twice(nvme_path, partial(Mlp, DEPTH), program)


def test_keep_vars_gives_the_parameters(nvme_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp()), adamw(m)))
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is p for name, p in model.named_parameters())
    close(model, optimizer)


def test_what_is_written_to_it_is_the_parameters(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        own = run.model.state_dict()
        for name, tensor in own.items():
            own[name].copy_(torch.randn(tensor.shape))
        run.note_model("copied")
        with torch.no_grad():
            for tensor in own.values():
                tensor.view(-1)[0] = 7
                tensor[-1:].add_(1)
                torch.add(tensor, 1, out=tensor)
                tensor += 2
        run.note_model("in place")
        other = [torch.randn(tensor.shape) for tensor in own.values()]
        for tensor, noise in zip(own.values(), other, strict=True):
            tensor.lerp_(noise, 0.5)
        run.note_model("lerp")
        for p in run.model.parameters():
            p.data.neg_()
        run.note("follows", dict(own))
        step(run)

    run_twice(nvme_path, partial(Mlp, DEPTH), program)


def test_what_is_read_from_it(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        state = run.model.state_dict()
        for w in (v for v in state.values() if v.dim() == 2):
            run.note("values", [w.sum(), w.norm(), w @ w, w.T, w + 1, 1 - w, w.half(), w.clone(), w.tolist()])
            run.note("text", [repr(w), str(w.dtype), w.device.type, w.layout, w.nbytes, w.stride()])
            run.note("same", [w.cpu() is w, w.contiguous() is w, w.to(torch.float32) is w, torch.is_tensor(w)])
            run.note("array", torch.from_numpy(w.numpy().copy()))
            run.note("detached", [w.detach(), w.data, w.detach().cpu()])
            run.note("reduced", [*w.max(0), *torch.topk(w, 3)])
            run.note("moved", torch.zeros_like(w).copy_(w))
            run.note("equal", [torch.equal(w, w.clone()), bool((w == w).all()), hash(w) == id(w)])
            run.note("views", [w[3], w.view(-1)[:5], *w.split(16), *w.chunk(2)])
        run.note("together", torch.stack([v.norm() for v in state.values()]))

    run_twice(nvme_path, partial(Mlp, DEPTH), program)


@pytest.mark.long
def test_loading_it_into_other_models(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        plain = Mlp(DEPTH)
        plain.load_state_dict(run.model.state_dict())
        run.note("plain", dict(plain.state_dict()))
        torch.manual_seed(5)
        another = Mlp(DEPTH)
        other_path = nvme_path / "another"
        if run.swapped:
            other_path.mkdir()
            with small_records():
                swapper.offload(another, adamw(another), config_for(other_path))
        run.model.load_state_dict(another.state_dict())
        run.note_model("loaded from another")
        another.load_state_dict(plain.state_dict())
        run.note("and into it", dict(another.state_dict()))
        with pytest.raises(RuntimeError, match="Missing key"):
            another.load_state_dict({})
        with pytest.raises(RuntimeError, match="size mismatch"):
            another.load_state_dict({name: torch.zeros(3) for name in run.model.state_dict()})
        run.model.load_state_dict(run.model.state_dict())
        step(run)

    run_twice(nvme_path, partial(Mlp, DEPTH), program)


def test_assigning_it_says_that_it_must_be_copied(nvme_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp()), adamw(m)))
    other = Mlp()
    with pytest.raises((swapper.SwapError, RuntimeError), match=r"make it a copy first \(clone\)"):
        other.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(swapper.SwapError, match="clone"):
        nn.Parameter(model.state_dict()["blocks.0.0.weight"])
    with pytest.raises(swapper.SwapError, match="clone"):
        model.state_dict()["blocks.0.0.weight"].requires_grad_()
    assert not model.state_dict()["blocks.0.0.weight"].requires_grad_(False).requires_grad
    copied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other.load_state_dict(copied, assign=True)
    assert [bits(p) for p in other.parameters()] == [bits(p) for p in model.parameters()]
    close(model, optimizer)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_share_their_memory(tied: bool, nvme_path: Path) -> None:
    def program(run: Run) -> None:
        loss_of(run, tokens).backward()
        run.finish_step()
        state = run.model.state_dict()
        pointers = [tensor.data_ptr() for tensor in state.values()]
        run.note("pointers", [pointers.index(pointer) for pointer in pointers])
        storages = [tensor.untyped_storage().data_ptr() for tensor in copy.deepcopy(state).values()]
        run.note("copied", [storages.index(pointer) for pointer in storages])
        file = io.BytesIO()
        torch.save(state, file)
        run.note("length of the file", len(file.getvalue()) // 1024)
        run.note("pickled", dict(pickle.loads(pickle.dumps(state))))

    run_twice(nvme_path, lambda: Llama(tied=tied), program)


@pytest.mark.long
def test_safetensors(nvme_path: Path, tmp_path: Path) -> None:
    def program(run: Run) -> None:
        step(run)
        path = tmp_path / f"{run.swapped}.safetensors"
        safetensors.torch.save_file(run.model.state_dict(), path)
        run.note("file", torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
        step(run)
        run.note("loaded", str(safetensors.torch.load_model(run.model, path)))
        run.note_model("loaded")
        safetensors.torch.save_model(run.model, str(path))
        run.note("model", torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))

    run_twice(nvme_path, partial(Mlp, DEPTH), program)


def test_safetensors_knows_tied_weights(nvme_path: Path, tmp_path: Path) -> None:
    def program(run: Run) -> None:
        loss_of(run, tokens).backward()
        run.finish_step()
        path = tmp_path / f"{run.swapped}.safetensors"
        safetensors.torch.save_model(run.model, str(path))
        run.note("file", str(sorted(safetensors.torch.load_file(path))))
        run.note("size", path.stat().st_size)
        run.note("loaded", str(safetensors.torch.load_model(run.model, path)))
        safetensors.torch.save_model(partial(Llama, tied=True)(), str(path))
        run.note("loaded from a plain model", str(safetensors.torch.load_model(run.model, path)))

    run_twice(nvme_path, partial(Llama, tied=True), program)


def test_parts_of_it_are_the_parameters(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        name, tensor = next((n, t) for n, t in run.model.state_dict().items() if t.dim() == 2)
        flat, row, corner, picked = tensor.view(-1), tensor[1], tensor[-2:, 1:4:2], tensor[[0, 1]]
        copy_of_picked = picked.clone()
        step(run)
        run.note(
            "followed", [flat.clone(), row.clone(), corner.clone(), tensor[0, 0].clone(), tensor.view((-1,)).sum()]
        )
        assert torch.equal(picked, copy_of_picked)
        row.fill_(0.5)
        corner[0].mul_(2)
        flat[3:5] = 7
        run.note("written", dict(run.model.named_parameters())[name].detach().clone())
        run.note("strides", [list(t.stride()) for t in (flat, row, corner)])
        assert row.data_ptr() - flat.data_ptr() == tensor.stride(0) * tensor.element_size()
        with pytest.raises(IndexError):
            tensor[10**6]
        with pytest.raises(RuntimeError):
            tensor.view(3, 10**6)

    run_twice(nvme_path, Mlp, program)


@pytest.mark.long
def test_parts_of_all_of_it_are_kept_while_the_model_runs(nvme_path: Path) -> None:
    """As transformers splits what it has fused, for every layer, before it writes the first file."""

    def program(run: Run) -> None:
        kept: list[torch.Tensor] = []
        for tensor in run.model.state_dict().values():
            kept += [*torch.chunk(tensor, 2, dim=0), *tensor.split(3), *tensor.split([1, len(tensor) - 1])]
            kept += [*tensor.unbind(), *tensor]
            kept += [tensor.T, tensor.mT, tensor.t()] if tensor.dim() == 2 else []
            kept += [tensor.narrow(0, 1, 2), tensor.select(0, -1), tensor.unsqueeze(0).squeeze(0), tensor.contiguous()]
            kept += [tensor.flatten(), tensor.reshape(1, -1), tensor.expand(2, *tensor.shape), tensor.transpose(0, -1)]
            kept += [tensor.ravel(), tensor.unfold(0, 2, 1), tensor.as_strided((2, 2), (1, 3), 1)]
            other = torch.empty(1, *tensor.shape)
            kept += [tensor.view_as(other), tensor.reshape_as(other), tensor[0].expand_as(other)]
            kept += [tensor.diagonal(), tensor.H, tensor.adjoint(), *tensor.vsplit(2)] if tensor.dim() == 2 else []
            kept += [torch.broadcast_to(tensor, (3, *tensor.shape))]
        kept += [part.contiguous() for part in kept if part.is_contiguous()]
        copies = [part.t().reshape(-1).clone() for part in kept if part.dim() == 2]
        step(run)
        run.note("kept", kept)
        run.note("copies", copies)
        kept[0].fill_(0.5)
        run.note_model("written")
        pointers = [part.data_ptr() - kept[0].data_ptr() for part in torch.chunk(kept[0], 2)]
        run.note("pointers", pointers)

    run_twice(nvme_path, partial(Mlp, DEPTH), program)


def test_a_part_is_what_it_was_though_its_arguments_are_changed(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        tensor = next(t for t in run.model.state_dict().values() if t.dim() == 2)
        rows, columns = tensor.shape
        dims, sizes, lengths, end = [1, 0], [rows * 2, columns // 2], [1, rows - 1], [0, 1]
        parts = [tensor.permute(dims), tensor.view(sizes), *tensor.split(lengths), tensor.as_strided([2, 3], end)]
        for of in (dims, sizes, lengths, end):
            of.reverse()
        run.note("shapes", [part.shape for part in parts])
        run.note("parts", [part.clone() for part in parts])
        run.note("parts of parts", [part[1:].t().clone() for part in parts if part.dim() == 2])

    run_twice(nvme_path, Mlp, program, changes=False)


def test_a_part_keeps_nothing_of_the_function_that_made_it(nvme_path: Path) -> None:
    class Local:
        pass

    def made(make: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> tuple[object, weakref.ref[Local]]:
        local = Local()
        return make(tensor), weakref.ref(local)

    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(DEPTH)), adamw(m)))
    tensor = next(t for t in model.state_dict().values() if t.dim() == 2)
    ways: list[Callable[[torch.Tensor], object]] = [
        *(lambda t: t[0], lambda t: t.T, lambda t: t.split(3), lambda t: [*t], lambda t: torch.chunk(t, 2)),
        *(lambda t: t.ravel(), lambda t: t[1].view(-1)[:2], lambda t: t[0].expand_as(t)),
    ]
    gc.collect()
    gc.disable()
    try:
        kept = [made(make, tensor) for make in ways]
        assert [local() for _, local in kept] == [None] * len(ways)
    finally:
        gc.enable()
    close(model, optimizer)


@pytest.mark.parametrize(
    "take",
    [list, torch.unbind, lambda t: t.split(1), lambda t: t.chunk(len(t))],
    ids=["list", "unbind", "split", "chunk"],
)
def test_the_work_for_all_rows_grows_as_their_number(
    take: Callable[[torch.Tensor], Sequence[torch.Tensor]], nvme_path: Path
) -> None:
    """Counted are the tensors that operations give: `unbind` of N rows gives N."""

    class Counted(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.made += len(tree_leaves(result))
            return result

    model, optimizer = offloaded(nvme_path, lambda: ((m := nn.Sequential(nn.Linear(WIDTH, 200))), adamw(m)))
    weight = model.state_dict()["0.weight"]

    def made_for(count: int) -> int:
        rows = weight[:count]
        with Counted() as counted:
            copies = [row.clone() for row in take(rows)]
        assert torch.equal(torch.stack(copies).reshape(count, -1), rows)
        return counted.made

    assert made_for(200) <= 2 * made_for(100)
    close(model, optimizer)


def test_a_part_of_what_was_given_data_of_other_strides_says_so(nvme_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := nn.Sequential(nn.Linear(WIDTH, WIDTH))), adamw(m)))
    row = model.state_dict()["0.weight"][1]
    close(model, optimizer)
    weight = dict(model.named_parameters())["0.weight"]
    weight.data = torch.arange(float(WIDTH * WIDTH)).view(WIDTH, WIDTH)
    assert torch.equal(row.clone(), torch.arange(WIDTH, 2.0 * WIDTH))
    weight.data = weight.data.t()
    with pytest.raises(swapper.SwapError, match=r"with strides .* call state_dict again"):
        row.clone()


def test_as_strided_stays_within_the_tensor(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for tensor in run.model.state_dict().values():
            last = tensor.numel() - 1
            run.note(
                "offset", [tensor[1:].as_strided((2,), (1,)).clone(), tensor[1:].as_strided((2,), (1,), 0).clone()]
            )
            run.note("end", tensor.as_strided((1, 2), (1, 0), last).clone())
            for size, stride, offset in (
                ((2,), (1,), last),
                ((last, 3), (1, 1), 0),
                ((2,), (-1,), 1),
                ((1,), (1,), -1),
            ):
                with pytest.raises(RuntimeError) as error:
                    tensor.as_strided(size, stride, offset)
                run.note("error", str(error.value))

    run_twice(nvme_path, Mlp, program, changes=False)


@pytest.mark.long
def test_an_address_stays_valid_while_others_are_used(nvme_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(DEPTH)), adamw(m)))
    state = model.state_dict()
    pointers = {name: tensor.data_ptr() for name, tensor in state.items()}
    stored = {name: tensor.untyped_storage() for name, tensor in model.state_dict().items()}
    for name, p in model.named_parameters():
        assert pointers[name] == stored[name].data_ptr()
        assert bytes(stored[name]) == bits(p)[3]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    for name, p in model.named_parameters():
        assert state[name].data_ptr() == pointers[name]
        assert bytes(stored[name]) == bits(p)[3], "what asks again sees what is there now"
    files = len(list(Path("/proc/self/fd").iterdir()))
    again = [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 1, "a mapping needs no descriptor"
    assert again == list(pointers.values())
    close(model, optimizer)


def test_it_outlives_the_model_and_swapping(nvme_path: Path) -> None:
    def state_of_a_model() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        model, _ = offloaded(nvme_path, lambda: ((m := Mlp(DEPTH)), adamw(m)))
        return model.state_dict(), {name: bits(p) for name, p in model.named_parameters()}

    state, expected = state_of_a_model()
    gc.collect()
    assert {name: bits(tensor) for name, tensor in state.items()} == expected
    del state
    gc.collect()
    assert not list(nvme_path.iterdir())

    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(DEPTH)), adamw(m)))
    state = model.state_dict()
    close(model, optimizer)
    assert {name: bits(tensor) for name, tensor in state.items()} == {n: bits(p) for n, p in model.named_parameters()}
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert {name: bits(tensor) for name, tensor in state.items()} == {n: bits(p) for n, p in model.named_parameters()}


def test_code_in_c_sees_the_values(nvme_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(DEPTH)), adamw(m)))
    state = list(model.state_dict().values())
    flat = torch._C._nn.flatten_dense_tensors(state[:2])
    assert bits(flat) == bits(torch.cat([p.detach().flatten() for p in list(model.parameters())[:2]]))
    close(model, optimizer)


@pytest.mark.long
def test_the_swapped_model_is_still_the_same(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        for _ in range(3):
            state = run.model.state_dict()
            run.check_facts()
            step(run)
            best = copy.deepcopy(state)
            step(run)
            run.model.load_state_dict(best)
            if run.swapped:
                assert all(isinstance(p, EvictedParameter) for p in run.model.parameters())
        run.note("facts", len(facts_of(run.model)))

    run_twice(nvme_path, partial(Mlp, DEPTH), program)


def test_a_drive_that_is_full_when_it_is_saved(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = offloaded(nvme_path, lambda: ((m := Mlp(DEPTH)), adamw(m)))

    def full(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(swapper.SwapIOError, match=r"a scratch file of .* is needed here"):
            torch.save(model.state_dict(), io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())
    assert not list(nvme_path.rglob("tmp*"))
    close(model, optimizer)


@pytest.mark.long
def test_saving_costs_disk_and_not_memory(nvme_path: Path, tmp_path: Path) -> None:
    program = f"""
import sys, torch, swapper
from torch import nn
sys.path.insert(0, {str(BENCHMARK.parent)!r})
from memory import Peak
config = swapper.OffloadConfig(nvme_path={str(nvme_path)!r}, pool_bytes="32MiB", bucket_bytes="4MiB",
                               offload_param={{"device": "nvme"}}, offload_optimizer={{"device": "none"}})
with swapper.init(config):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024)) for _ in range(60)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
swapper.offload(model, optimizer, config)
with torch.no_grad():
    model(torch.randn(1, 1024))
torch.save(torch.zeros(3), {str(tmp_path / "small")!r})
with Peak() as before:
    import time; time.sleep(0.05)
with Peak() as peak:
    torch.save(model.state_dict(), {str(tmp_path / "model.pt")!r})
    model.load_state_dict(torch.load({str(tmp_path / "model.pt")!r}, mmap=True))
print(peak.bytes - before.bytes)
"""
    output = run_program([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert (tmp_path / "model.pt").stat().st_size > 250e6
    assert int(output) < 40e6


@pytest.mark.long
def test_a_view_of_a_parameter_from_before_offload_lets_it_stay(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Mlp(8)
    named = dict(model.named_parameters())
    detached = named["blocks.0.0.weight"].detach()
    array = named["blocks.1.0.weight"].detach().numpy()
    row = named["blocks.2.0.bias"].data[3:5]
    graph = model(torch.randn(2, WIDTH)).sum()
    named["blocks.4.0.weight"].grad = torch.zeros(WIDTH, WIDTH)
    optimizer = adamw(model)
    with small_records():
        swapper.offload(model, optimizer, config_for(nvme_path))
    viewed = {"blocks.0.0.weight", "blocks.1.0.weight", "blocks.2.0.bias"}
    assert set(swapper_of(model).stays) == viewed
    for name in viewed:
        lines = [record.message for record in caplog.records if name in record.message]
        assert len(lines) == 1
        assert "shares its memory" in lines[0]
    graph.backward()
    optimizer.step()
    assert bits(detached) == bits(named["blocks.0.0.weight"])
    assert bits(torch.from_numpy(array)) == bits(named["blocks.1.0.weight"])
    assert bits(row) == bits(named["blocks.2.0.bias"][3:5])
    detached.zero_()
    assert not named["blocks.0.0.weight"].any()
    close(model, optimizer)


@pytest.mark.long
def test_state_dict_of_a_tied_model_while_it_is_gathered(nvme_path: Path) -> None:
    def program(run: Run) -> None:
        with swapper.gathered(run.model.blocks[0]):  # type: ignore[arg-type, index, union-attr]
            state = run.model.state_dict()
        run.note("state", dict(state))
        loss_of(run, tokens).backward()
        run.finish_step()
        run.note("follows", dict(state))

    run_twice(nvme_path, lambda: Gpt2(functional=False), program, spare_bytes=16 * 16384)
