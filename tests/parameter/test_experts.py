"""Models with experts that are fused, from files that have them one by one."""

from __future__ import annotations

import gc
import os
import random
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import EXPERTS, Routed, config_of, generate, made, one_by_one, tokens
from interrupts import interrupted_at, places_of
from sampling import ALL
from torch import nn
from twins import bits, config_for, small_records, swapper_of
from weight_files import hollow, write_shards, write_weights

import swapper
from swapper.metrics import Timeline
from swapper.parameter import from_files
from swapper.parameter.experts import ExpertCache

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _all_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of tests are small: so are the records, and what stays."""
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 300)
    with small_records():
        yield


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.sampled(8)
def test_models_of_transformers_have_the_bits_of_those_in_memory(
    kind: str, experts: str, nvme_path: Path, tmp_path: Path
) -> None:
    chance = random.Random(f"{kind} {experts}")
    config = config_of(kind)
    dtype = chance.choice([torch.float32, torch.bfloat16])
    reference = made(config, dtype, experts)
    index = write_shards(tmp_path / "weights", one_by_one(reference), chance, [chance.choice([0, 16, 24, 32, 56, 5])])
    model = hollow(made(config, dtype, experts))
    swapper.offload(model, config=config_for(nvme_path, pool_bytes="1MiB"), weights=index)
    for batch in (1, 4):
        assert generate(model, batch, do_sample=True) == generate(reference, batch, do_sample=True)
    assert swapper_of(model).metrics.bytes_written == 0


def least_pool_bytes(make: Callable[[str], object]) -> int:
    """The least that will do, as the error of less says."""
    with pytest.raises(swapper.ConfigError) as caught:
        make("48KiB")
    found = re.search(r"set pool_bytes to at least (\d+)", str(caught.value))
    assert found is not None, caught.value
    return int(found[1])


@pytest.mark.long
@pytest.mark.parametrize("room", ["least", "some", "all"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe"])
@pytest.mark.sampled(9)
def test_a_token_reads_the_experts_that_are_routed_to_and_no_others(
    kind: str, experts: str, room: str, nvme_path: Path, tmp_path: Path
) -> None:
    chance = random.Random(f"{kind} {experts} {room}")
    config = config_of(kind, num_hidden_layers=3)
    reference = made(config, chance.choice([torch.float32, torch.bfloat16]), experts)
    index = write_shards(tmp_path / "weights", one_by_one(reference), chance, [chance.randrange(64) for _ in range(2)])

    def offloaded(pool_bytes: str | int) -> nn.Module:
        model = hollow(made(config, next(reference.parameters()).dtype, experts))
        return swapper.offload(model, config=config_for(nvme_path, pool_bytes=pool_bytes), weights=index)[0]

    pool_bytes = 4 << 20
    if room != "all":
        pool_bytes = least_pool_bytes(offloaded) + (chance.randrange(40) * 4096 if room == "some" else 0)
    model = offloaded(pool_bytes)
    routed = Routed(model)
    with Timeline() as timeline:
        assert generate(model) == generate(reference)
        assert generate(model, 3, do_sample=True) == generate(reference, 3, do_sample=True)
    reads = [e.record for e in timeline.events() if e.name == "read" and e.record is not None]
    dense = len(swapper_of(model).plan.records)
    assert all(number < dense for _, which, number in reads if which == "param"), "no parameter came whole"
    wanted = {(layer, expert) for layer, those in routed.calls for expert in those}
    found = [
        divmod(number // EXPERTS, 2)[0] * EXPERTS + number % EXPERTS for _, which, number in reads if which == "expert"
    ]
    assert {layer * EXPERTS + expert for layer, expert in wanted} == set(found)
    assert len(found) <= 2 * sum(len(those) for _, those in routed.calls), "each once in a call, at most"
    if room == "all":
        assert len(found) == 2 * len(wanted), "what was read stays"
    assert swapper_of(model).metrics.bytes_written == 0


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_all_that_a_router_has_chosen_is_on_its_way_when_the_first_of_it_is_used(
    experts: str, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = made(config_of("mixtral"), torch.float32, experts)
    index = write_shards(tmp_path / "weights", one_by_one(reference), random.Random(1), [40, 3])
    model = hollow(made(reference.config, torch.float32, experts))
    swapper.offload(model, config=config_for(nvme_path, pool_bytes="4MiB"), weights=index)
    routed, there, part = Routed(model), dict[int, set[int]](), ExpertCache.part

    def noted(cache: ExpertCache, number: int) -> torch.Tensor:
        there.setdefault(len(routed.calls), {record.key.number for record in cache.record_cache.records})
        return part(cache, number)

    monkeypatch.setattr(ExpertCache, "part", noted)
    assert generate(model) == generate(reference)
    assert sorted(there) == list(range(1, len(routed.calls) + 1))
    for call, (layer, chosen) in enumerate(routed.calls, start=1):
        assert {(2 * layer + matrix) * EXPERTS + expert for matrix in (0, 1) for expert in chosen} <= there[call]


def change(state: dict[str, torch.Tensor], name: str, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state[name] = made(state[name])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda s: s.pop("model.layers.1.block_sparse_moe.experts.3.w3.weight"), "model.layers.1.mlp.experts.gate_up"),
        (lambda s: s.update({"model.layers.1.block_sparse_moe.experts.6.w1.weight": torch.ones(96, 64)}), "experts.6"),
        (lambda s: change(s, "model.layers.0.block_sparse_moe.experts.5.w2.weight", torch.t), "experts.5.w2"),
        (lambda s: change(s, "model.layers.0.block_sparse_moe.experts.5.w1.weight", torch.Tensor.half), "experts.5.w1"),
    ],
    ids=["missing", "too many", "shape", "dtype"],
)
def test_experts_that_do_not_fit_are_named(damage: Any, named: str, nvme_path: Path, tmp_path: Path) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    state = one_by_one(reference)
    damage(state)
    index = write_shards(tmp_path / "weights", state, random.Random(1), [0, 8])
    with pytest.raises(swapper.SwapError, match=re.escape(named)):
        swapper.offload(hollow(reference), config=config_for(nvme_path), weights=index)


def offloaded(reference: nn.Module, nvme_path: Path, directory: Path, **more: Any) -> nn.Module:
    """A model of the weights of `reference`, from files that have its experts one by one."""
    index = write_shards(directory, one_by_one(reference), random.Random(1), [40, 3])
    model = hollow(made(reference.config, next(reference.parameters()).dtype, "eager"))
    return swapper.offload(model, config=config_for(nvme_path, **more), weights=index)[0]


def param(**more: object) -> dict[str, object]:
    return {"device": "nvme", **more}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("experts", ["auto", "whole"])
def test_gradients_have_the_bits_of_the_model_in_memory(
    experts: str, frozen: bool, nvme_path: Path, tmp_path: Path
) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights", offload_param=param(experts=experts))
    found = []
    for each in (model, reference):
        for name, p in each.named_parameters():
            p.requires_grad_(not (frozen and "experts" in name))
        for seed in range(2):
            each(tokens(seed, batch=2)).logits.square().mean().backward()
        found.append([bits(p.grad) for p in each.parameters()])
    assert found[0] == found[1]
    assert swapper_of(model).metrics.bytes_written == 0


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_parameter_stays_one(kind: str, nvme_path: Path, tmp_path: Path) -> None:
    reference = made(config_of(kind), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights")
    assert [(n, p.shape, p.stride(), p.dtype) for n, p in model.named_parameters()] == [
        (n, p.shape, p.stride(), p.dtype) for n, p in reference.named_parameters()
    ]
    assert not any("experts" in name and "proj" in name and "bias" not in name for name in swapper_of(model).stays)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert bits(one) == bits(other)
        if one.dim() == 3:
            with torch.no_grad():
                for index in (0, -1, EXPERTS - 1, torch.tensor(2), torch.tensor([3, 3, 0]), slice(1, 3), (1, 2)):
                    assert bits(one[index]) == bits(other[index])
                assert bits(one.transpose(1, 2)[1]) == bits(other.transpose(1, 2)[1])
                with pytest.raises(IndexError):
                    one[EXPERTS]
    assert bits(dict(model.state_dict())) == bits(dict(reference.state_dict()))
    generated = generate(reference)
    assert generate(model) == generated
    swapper_of(model).close(keep_values=True)
    assert generate(model) == generated
    assert bits(dict(model.state_dict())) == bits(dict(reference.state_dict()))


def test_a_model_is_freed_with_its_experts(nvme_path: Path, tmp_path: Path) -> None:
    def block() -> nn.Module:  # Whole models of transformers are cycles of their own.
        return transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config_of("mixtral")).eval()

    reference = block()
    for p in reference.parameters():
        nn.init.normal_(p)
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict(), 8)
    model = swapper.offload(hollow(block()), config=config_for(nvme_path), weights=path)[0]
    x = torch.randn(1, 3, 64)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            assert bits(model(x)) == bits(reference(x))
        gone = [weakref.ref(model.experts.gate_up_proj), weakref.ref(swapper_of(model)), weakref.ref(model)]
        del model
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_an_expert_that_is_changed_is_named(nvme_path: Path, tmp_path: Path) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2].add_(1)
    with pytest.raises(swapper.SwapError, match=re.escape("model.layers.1.mlp.experts.down_proj[2]")):
        swapper_of(model).flush()


def test_with_copies_on_write_experts_are_changed(nvme_path: Path, tmp_path: Path) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    more = param(copy_on_write=True)
    model = offloaded(reference, nvme_path, tmp_path / "weights", offload_param=more)
    with torch.no_grad():
        for each in (model, reference):
            each.model.layers[1].mlp.experts.down_proj[2].add_(1)
    assert generate(model) == generate(reference)


def reads_of_parts(model: nn.Module) -> int:
    with Timeline() as timeline:
        generate(model)
    return sum(e.name == "read" and e.record is not None and e.record[1] == "expert" for e in timeline.events())


@pytest.mark.parametrize("experts", ["auto", "whole"])
def test_experts_come_whole_if_that_is_wanted(experts: str, nvme_path: Path, tmp_path: Path) -> None:
    reference = made(config_of("qwen2_moe"), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights", offload_param=param(experts=experts))
    assert (reads_of_parts(model) > 0) == (experts == "auto")
    assert generate(model) == generate(reference)


class OtherExperts(nn.Module):
    """Of no class that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(4, -1, -1), self.proj).sum(0)


def test_an_unknown_class_is_brought_whole_with_one_line(
    nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = nn.Sequential(OtherExperts(), OtherExperts())
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict(), 8)
    model = hollow(nn.Sequential(OtherExperts(), OtherExperts()))
    swapper.offload(model, config=config_for(nvme_path), weights=path)
    x = torch.randn(1, 5, 32)
    with torch.no_grad():
        assert bits(model(x)) == bits(reference(x))
    assert [r.getMessage() for r in caplog.records if r.name.startswith("swapper")] == [
        "experts of OtherExperts are brought whole: it is not known that it takes them one at a time"
    ]


def test_a_use_of_all_is_brought_whole_with_one_line(
    nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights")
    with torch.no_grad():
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert bits(one.sum()) == bits(other.sum())
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("swapper")]
    assert lines == ["model.layers.0.mlp.experts.gate_up_proj is used as a whole, and brought whole"]


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 32))


class ListOfExperts(nn.Module):
    """As in classes from before experts were fused: a module for each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 8)
        self.experts = nn.ModuleList(Expert() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for chosen in self.gate(x).topk(2).indices.unique().tolist():
            x = x + self.experts[chosen](x)
        return x


@pytest.mark.parametrize("room", ["least", "some"])
def test_an_expert_that_is_not_called_is_not_read(room: str, nvme_path: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    reference = nn.Sequential(ListOfExperts(), ListOfExperts())
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict(), 8)

    def offloaded(pool_bytes: str | int) -> nn.Module:
        model = hollow(nn.Sequential(ListOfExperts(), ListOfExperts()))
        return swapper.offload(model, config=config_for(nvme_path, pool_bytes=pool_bytes), weights=path)[0]

    model = offloaded(least_pool_bytes(offloaded) if room == "least" else "96KiB")
    wanted: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Expert):
            module.register_forward_pre_hook(lambda module, args, name=name: wanted.add(name))
    records = swapper_of(model).plan.experts.modules
    counts = []
    for seed in range(6):
        wanted.clear()
        x = torch.randn(1, 32, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), Timeline() as timeline:
            assert bits(model(x)) == bits(reference(x))
        read = [e.record for e in timeline.events() if e.name == "read" and e.record is not None]
        found = [location.name for _, kind, i in read if kind == "expert" for location in records[i].locations]
        assert {name.rsplit(".", 2)[0] for name in found} <= wanted
        counts.append(len(found))
    assert counts[0] == 2 * 4, "two matrices of two experts in two layers"
    assert max(counts[1:]) <= 8
    found_grads = []
    for each in (model, reference):
        each(torch.ones(1, 32)).sum().backward()
        found_grads.append([None if p.grad is None else bits(p.grad) for p in each.parameters()])
    assert found_grads[0] == found_grads[1]
    swapper_of(model).flush()
    with torch.no_grad(), pytest.raises(swapper.SwapError, match=re.escape("0.experts.1.0.weight")):
        model[0].experts[1][0].weight.add_(1)


def test_the_rest_of_the_model_has_the_pool_first(nvme_path: Path, tmp_path: Path) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights", pool_bytes="1MiB")
    plan = swapper_of(model).plan
    dense, parts = plan.kept_bytes, plan.experts.least_bytes
    swapper_of(model).close()
    model = offloaded(reference, nvme_path, tmp_path / "more", pool_bytes=dense + 3 * parts)
    with torch.no_grad():  # Experts come first, and more of them than have room.
        for layer in model.model.layers:
            for expert in range(EXPERTS):
                layer.mlp.experts.gate_up_proj[expert].sum()
    assert generate(model) == generate(reference)
    with Timeline() as timeline:
        assert generate(model) == generate(reference)
    read = [e.record[1] for e in timeline.events() if e.name == "read" and e.record is not None]
    assert set(read) == {"expert"}, "all else stays"


def test_experts_that_are_used_most_often_stay(nvme_path: Path, tmp_path: Path) -> None:
    reference = made(config_of("mixtral", num_hidden_layers=1), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights", pool_bytes="1MiB")
    plan = swapper_of(model).plan
    pool_bytes = plan.kept_bytes + 2 * plan.experts.least_bytes  # For two experts and more, not for three.
    swapper_of(model).close()
    model = offloaded(reference, nvme_path, tmp_path / "more", pool_bytes=pool_bytes)
    proj = model.model.layers[0].mlp.experts.gate_up_proj

    def reads(expert: int) -> int:
        before = swapper_of(model).metrics.reads
        with torch.no_grad():
            proj[expert].sum()
        return swapper_of(model).metrics.reads - before

    for _ in range(3):
        reads(0)
    for expert in (1, 2, 3, 4, 5):
        assert reads(expert) == 1
        assert reads(0) == 0


def test_a_file_that_changes_is_named(nvme_path: Path, tmp_path: Path) -> None:
    reference = made(config_of("mixtral"), torch.float32, "eager")
    model = offloaded(reference, nvme_path, tmp_path / "weights")
    proj = model.model.layers[1].mlp.experts.down_proj
    with torch.no_grad():
        assert bits(proj[2]) == bits(reference.model.layers[1].mlp.experts.down_proj[2])
        for file in (tmp_path / "weights").glob("*.safetensors"):
            os.utime(file)
        with pytest.raises(swapper.SwapError, match=r"it was changed since.*model-0000\d-of-00002.safetensors"):
            proj[3]


@pytest.mark.long
@pytest.mark.parametrize("how", ["memory", "meta"])
def test_ctrl_c_anywhere_leaves_all_as_it_was_or_done(how: str, nvme_path: Path, tmp_path: Path) -> None:
    def block() -> nn.Module:
        torch.manual_seed(5)
        made = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config_of("mixtral")).eval()
        for p in made.parameters():
            nn.init.normal_(p)
        return made

    reference = block()
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict(), 8)
    x = torch.randn(1, 3, 64)
    with torch.no_grad():
        expected = bits(reference(x))
    config = config_for(nvme_path)
    files = "parameter/from_files", "parameter/experts"
    fresh = (lambda: hollow(block())) if how == "meta" else block
    model, struck = fresh(), 0
    offload = lambda: swapper.offload(model, config=config, weights=path)  # noqa: E731
    for place in places_of(offload, *files, sample=None if ALL else 8):
        swapper_of(model).close()
        model = fresh()
        before = [(name, id(p), type(p), sorted(vars(p))) for name, p in model.named_parameters()]
        cut = interrupted_at(place, offload, *files)
        struck += cut
        if "swapper" not in vars(model):
            assert cut
            assert [(name, id(p), type(p), sorted(vars(p))) for name, p in model.named_parameters()] == before
            swapper.offload(model, config=config, weights=path)
        with torch.no_grad():
            assert bits(model(x)) == expected
    swapper_of(model).close()
    assert struck >= (60 if ALL else 5)
