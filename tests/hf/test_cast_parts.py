"""Of experts and embeddings whose dtype is not that of the files those parts are read, and cast, that are used."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from expert_models import EXPERTS, Routed, config_of, generate, made
from twins import bits, config_for, small_records, swapper_of

import swapper
from swapper.metrics import Timeline
from swapper.parameter import embeddings, from_files

transformers = pytest.importorskip("transformers")

from pretrained import aligned  # noqa: E402

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _all_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 300)
    with small_records():
        yield


@pytest.mark.long
@pytest.mark.parametrize("room", ["2MiB", "8MiB"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"])
@pytest.mark.sampled(6)
def test_only_the_experts_that_are_routed_to_are_read_and_cast(
    kind: str, experts: str, room: str, nvme_path: Path, tmp_path: Path
) -> None:
    chance = random.Random(f"{kind} {experts} {room}")
    dtypes = chance.sample([torch.float32, torch.bfloat16], 2)
    config = config_of(kind, num_hidden_layers=3)
    made(config, dtypes[0], experts).save_pretrained(tmp_path / "model", max_shard_size=chance.choice(["60KB", "1GB"]))
    how = {"dtype": dtypes[1], "experts_implementation": experts}
    reference = aligned(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", **how))
    model = swapper.from_pretrained(tmp_path / "model", config_for(nvme_path, pool_bytes=room), **how)
    assert {p.dtype for p in model.parameters()} == {dtypes[1]}
    routed = Routed(model)
    with Timeline() as timeline:
        assert generate(model) == generate(reference)
        assert generate(model, 3, do_sample=True) == generate(reference, 3, do_sample=True)
    reads = [e.record for e in timeline.events() if e.name == "read" and e.record is not None]
    dense = len(swapper_of(model).plan.records)
    assert all(number < dense for _, which, number in reads if which == "param"), "no parameter came whole"
    wanted = {(layer, expert) for layer, those in routed.calls for expert in those}
    found = {divmod(n // EXPERTS, 2)[0] * EXPERTS + n % EXPERTS for _, which, n in reads if which == "expert"}
    assert {layer * EXPERTS + expert for layer, expert in wanted} == found
    assert swapper_of(model).metrics.bytes_written == 0
    swapper_of(model).close(keep_values=True)
    assert bits(dict(model.state_dict())) == bits(dict(reference.state_dict()))


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=" to ".join)
def test_rows_of_an_embedding_are_cast(
    dtypes: tuple[str, str], nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "LEAST_BYTES", 1000)
    monkeypatch.setattr(embeddings, "_BLOCK_BYTES", 1)
    config = config_of("mixtral", vocab_size=5000, num_hidden_layers=1)
    made(config, getattr(torch, dtypes[0]), "eager").save_pretrained(tmp_path / "model")
    reference = aligned(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtypes[1]))
    model = swapper.from_pretrained(tmp_path / "model", config_for(nvme_path, pool_bytes="6MiB"), dtype=dtypes[1])
    tokens = torch.randint(0, 5000, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted = reference.model.embed_tokens(tokens)
        for _ in range(2):
            assert torch.equal(model.model.embed_tokens(tokens), wanted)
    weight = reference.model.embed_tokens.weight
    read_bytes = swapper_of(model).metrics.bytes_read
    assert 0 < read_bytes <= len(tokens.unique()) * (5 * weight[0].nbytes * 4 + 8192)
    assert torch.equal(model(tokens).logits, reference(tokens).logits), "with gradients it comes whole"
