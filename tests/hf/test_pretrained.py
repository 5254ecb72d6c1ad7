"""A model of transformers whose weights stay in its files gives the bits of `from_pretrained`."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from twins import bits, config_for, small_records, swapper_of
from weight_files import write_weights

import swapper
from swapper.metrics import Timeline
from swapper.parameter import from_files

transformers = pytest.importorskip("transformers")

from pretrained import GENERATES, aligned, change, generated, inputs_for, save_any, save_tiny  # noqa: E402

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _all_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 300)
    with small_records():
        yield


def files_in(path: Path) -> list[str]:
    return [each.name for each in path.rglob("*") if each.is_file()]


def pretrained(nvme_path: Path, path: Path | str, offload_param: Any = None, **kwargs: Any) -> Any:
    """In a pool of 160 KiB, or the least that will do, as the error of less says."""
    more = {} if offload_param is None else {"offload_param": offload_param}
    config = config_for(nvme_path, pool_bytes="160KiB", offload_optimizer={"device": "none"}, **more)
    try:
        return swapper.from_pretrained(path, config, **kwargs)
    except swapper.ConfigError as error:
        found = re.search(r"set pool_bytes to at least (\d+)", str(error))
        if found is None:
            raise
    config = config.model_copy(update={"pool_bytes": int(found[1])})
    return swapper.from_pretrained(path, config, **kwargs)


def reference(path: Path, **kwargs: Any) -> Any:
    return aligned(transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs))


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", GENERATES)
def test_generate_gives_the_logits_of_from_pretrained(
    name: str, dtype: torch.dtype, nvme_path: Path, tmp_path: Path
) -> None:
    made = save_tiny(tmp_path / "model", name, dtype)
    model, plain = pretrained(nvme_path, tmp_path / "model"), reference(tmp_path / "model")
    assert type(model) is type(plain) is made
    assert not model.training
    assert model.generation_config == plain.generation_config
    assert model.config.to_dict() == plain.config.to_dict()
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert swapper_of(model).plan.records
    for batch in (1, 4):
        inputs = inputs_for(plain, batch, torch.Generator().manual_seed(batch))
        for way in WAYS.values():
            assert generated(model, inputs, **way) == generated(plain, inputs, **way)
    assert swapper_of(model).metrics.bytes_written == 0


RESIDUES = (0, 16, 24, 32, 56, 31)
"""Where tensors of shards begin, mod 64: what others' files have, and one after a header of an odd length."""


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shards_at_every_residue(name: str, nvme_path: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", name, torch.float32)
    plain = reference(tmp_path / "model")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) >= len(RESIDUES)
    for file, residue in zip(files, itertools.cycle(RESIDUES), strict=False):
        write_weights(file, load_file(file), residue)
    model = pretrained(nvme_path, tmp_path / "model")
    for batch in (1, 4):
        inputs = inputs_for(plain, batch, torch.Generator().manual_seed(batch))
        assert generated(model, inputs, do_sample=False) == generated(plain, inputs, do_sample=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_models_in_one_pool_assist_each_other(dtype: torch.dtype, nvme_path: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", dtype)
    save_tiny(tmp_path / "draft", "llama tied", dtype)
    config = config_for(nvme_path, pool_bytes="512KiB", offload_optimizer={"device": "none"})
    model, draft = (swapper.from_pretrained(tmp_path / name, config) for name in ("model", "draft"))
    plain, small = (reference(tmp_path / name) for name in ("model", "draft"))
    inputs = inputs_for(plain, 1, torch.Generator().manual_seed(1))
    for way in (WAYS["greedy"], WAYS["sampling"]):
        found = generated(model, inputs, assistant_model=draft, **way)
        assert found == generated(plain, inputs, assistant_model=small, **way)
    assert files_in(nvme_path) == ["lock"]


def test_a_pipeline_takes_the_model(nvme_path: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", torch.float32)
    tokenizer = letters()
    made = []
    for model in (pretrained(nvme_path, tmp_path / "model"), reference(tmp_path / "model")):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        made.append(pipe(["abc", "defgh"], batch_size=2, max_new_tokens=5, do_sample=False))
    assert made[0] == made[1]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_loaded_with_its_model(nvme_path: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    save_tiny(tmp_path / "model", "llama", torch.float32)
    tuned = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    tuned.save_pretrained(tmp_path / "adapter")
    plain = reference(tmp_path / "adapter")
    tokens = torch.arange(9)[None]
    model = pretrained(nvme_path, tmp_path / "adapter")
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    around = peft.PeftModel.from_pretrained(pretrained(nvme_path, tmp_path / "model"), tmp_path / "adapter")
    assert torch.equal(around(tokens).logits, plain(tokens).logits)


def letters() -> Any:
    """A tokenizer of single letters."""
    tokenizers = pytest.importorskip("tokenizers")
    table = {"[PAD]": 0, "[UNK]": 1, **{chr(97 + i): i + 2 for i in range(26)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", padding_side="left"
    )


def test_a_name_is_found_in_the_cache_of_hugging_face_without_a_network(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`snapshots/COMMIT/NAME` are links to `blobs/HASH`; `refs/main` has the commit."""
    made = tmp_path / "made"
    save_tiny(made, "llama tied", torch.float32)
    entry = tmp_path / "hub" / "models--someone--model"
    snapshot = entry / "snapshots" / ("0123456789" * 4)
    for directory in (snapshot, entry / "blobs", entry / "refs"):
        directory.mkdir(parents=True)
    (entry / "refs" / "main").write_text(snapshot.name)
    for i, file in enumerate(sorted(made.iterdir())):
        os.rename(file, entry / "blobs" / f"{i:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
    plain = reference(snapshot)
    tokens = torch.arange(9)[None]
    for path in (entry, snapshot, "someone/model"):
        model = pretrained(nvme_path, path, cache_dir=tmp_path / "hub", local_files_only=True)
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
        swapper_of(model).close()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "WhisperForConditionalGeneration"])
def test_encoders_and_decoders(name: str, dtype: torch.dtype, nvme_path: Path, tmp_path: Path) -> None:
    made = save_any(tmp_path / "model", name, dtype)
    model = pretrained(nvme_path, tmp_path / "model")
    plain = aligned(made.from_pretrained(tmp_path / "model"))
    assert type(model) is made
    generator = torch.Generator().manual_seed(2)
    for batch in (1, 4):
        if "Whisper" in name:
            inputs = {"input_features": torch.randn(batch, 8, 64, generator=generator).to(dtype)}
        else:
            inputs = inputs_for(plain, batch, generator)
        for way in WAYS.values():
            way = {**way, "decoder_start_token_id": 1}
            assert generated(model, inputs, **way) == generated(plain, inputs, **way)


def test_tokens_after_the_first_ones_read_nothing_of_the_encoder(nvme_path: Path, tmp_path: Path) -> None:
    """The first forward is another than those that follow it, whose order is learnt, too."""
    save_any(tmp_path / "model", "T5ForConditionalGeneration", torch.float32)
    model = pretrained(nvme_path, tmp_path / "model")
    owner, seen = swapper_of(model), list[tuple[int, float]]()
    model.register_forward_hook(lambda *_: seen.append((owner.metrics.bytes_read, time.perf_counter())))
    inputs = inputs_for(model, 1, torch.Generator().manual_seed(1))
    with Timeline() as timeline:
        model.generate(**inputs, decoder_start_token_id=1, do_sample=False, min_new_tokens=8, max_new_tokens=8)
    lengths = {held.number: held.length_bytes for held in owner._all}
    records = owner.plan.records
    of_encoder = {r.number for r in records if all(each.name.startswith("encoder.") for each in r.locations)}
    reads = [e for e in timeline.events() if e.name == "read" and e.record is not None]
    late = {e.record[2] for e in reads if e.record is not None and e.start_s > seen[1][1]}
    assert of_encoder and late and not late & of_encoder
    most_bytes = sum(lengths.values()) - sum(lengths[each] for each in of_encoder)
    for (before, _), (after, _) in itertools.pairwise(seen[2:]):
        assert after - before <= most_bytes - owner._budget_bytes + 2 * max(lengths.values())


def test_a_cache_of_fixed_length_or_none(nvme_path: Path, tmp_path: Path) -> None:
    made = save_any(tmp_path / "model", "Gemma2ForCausalLM", torch.float32, sliding_window=4)
    model, plain = pretrained(nvme_path, tmp_path / "model"), aligned(made.from_pretrained(tmp_path / "model"))
    inputs = inputs_for(plain, 4, torch.Generator().manual_seed(4))
    for way in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        assert generated(model, inputs, do_sample=False, **way) == generated(plain, inputs, do_sample=False, **way)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama tied", "mixtral", "gpt2"])
def test_another_dtype_is_cast_in_the_pool(name: str, asked: torch.dtype, nvme_path: Path, tmp_path: Path) -> None:
    saved = torch.bfloat16 if asked == torch.float32 else torch.float32
    save_tiny(tmp_path / "model", name, saved)
    model = pretrained(nvme_path, tmp_path / "model", dtype=asked)
    plain = reference(tmp_path / "model", dtype=asked)
    assert {p.dtype for p in model.parameters()} == {asked}
    assert all(location.offset_bytes % 64 == 0 for held in swapper_of(model)._all for location in held.plan.locations)
    longest = max(swapper_of(model)._all, key=lambda held: held.length_bytes)
    values_bytes = sum(location.length_bytes for location in longest.plan.locations)
    assert longest.length_bytes >= values_bytes * (1 + saved.itemsize / asked.itemsize)
    inputs = inputs_for(plain, 2, torch.Generator().manual_seed(0))
    assert generated(model, inputs, do_sample=False) == generated(plain, inputs, do_sample=False)
    with pytest.raises(swapper.ConfigError, match=r"of the files that are cast or converted in it"):
        swapper.from_pretrained(tmp_path / "model", config_for(nvme_path, pool_bytes="48KiB"), dtype=asked)


def test_what_is_cast_may_be_changed(nvme_path: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", torch.bfloat16)
    param = {"device": "nvme", "copy_on_write": True}
    model = pretrained(nvme_path, tmp_path / "model", dtype=torch.float32, offload_param=param)
    plain = reference(tmp_path / "model", dtype=torch.float32)
    tokens = torch.arange(9)[None]
    for factor in (1, 2, 3):
        with torch.no_grad():
            for each in (model, plain):
                for p in each.parameters():
                    p.mul_(factor)
        for _ in range(2):
            assert torch.equal(model(tokens).logits, plain(tokens).logits)
    assert swapper_of(model).metrics.bytes_written > 0


def test_a_run_that_writes_nothing_needs_no_drive_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "llama", torch.float32)
    plain = reference(tmp_path / "model")
    model = swapper.from_pretrained(tmp_path / "model", {"pool_bytes": "256KiB", "bucket_bytes": "16KiB"})
    monkeypatch.chdir(tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    tokens = torch.arange(9)[None]
    for _ in range(2):
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
    assert bits(dict(model.state_dict())) == bits(dict(plain.state_dict()))
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(swapper.ConfigError, match="nvme_path: null is not enough for the address"):
        model.model.embed_tokens.weight.data_ptr()
    with swapper.gathered(model.model.embed_tokens):
        assert model.model.embed_tokens.weight.data_ptr() % 64 == 0
    swapper_of(model).close()
    with pytest.raises(swapper.ConfigError, match=r"nvme_path: null is not enough for offload_param\.copy_on_write"):
        swapper.from_pretrained(tmp_path / "model", {"offload_param": {"copy_on_write": True}})
    with pytest.raises(swapper.ConfigError, match="device: none leaves parameters in memory"):
        swapper.from_pretrained(tmp_path / "model", {"offload_param": {"device": "none"}})


def test_what_is_not_in_the_files_is_refused_unless_it_may_be_made(nvme_path: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", torch.float32)
    with pytest.raises(swapper.SwapError, match=r"it lacks score\.weight .*model-00001-of-.*strict=False"):
        pretrained(nvme_path, tmp_path / "model", model_class="LlamaForSequenceClassification")
    torch.manual_seed(4)
    model = pretrained(nvme_path, tmp_path / "model", model_class="LlamaForSequenceClassification", strict=False)
    assert swapper_of(model).stays["score.weight"] == "it is in no file"
    torch.manual_seed(4)
    plain = aligned(transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "model"))
    tokens = torch.arange(5, 12)[None]
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_a_head_that_is_made_beside_weights_that_are_all_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # With the real length of what is small there is no record.
    save_tiny(tmp_path / "model", "llama", torch.float32)
    tokens = torch.arange(5, 12)[None]
    torch.manual_seed(4)
    model = swapper.from_pretrained(tmp_path / "model", {}, model_class="LlamaForSequenceClassification", strict=False)
    torch.manual_seed(4)
    plain = aligned(transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "model"))
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_an_index_of_former_shards_beside_a_whole_file_is_not_looked_at(nvme_path: Path, tmp_path: Path) -> None:
    made = save_tiny(tmp_path / "model", "llama", torch.float32)
    other = made.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    for variant in (None, "ema"):
        other.save_pretrained(tmp_path / "model", variant=variant, max_shard_size=50_000)
        other.save_pretrained(tmp_path / "model", variant=variant)  # Removes the shards, and leaves their index.
        dotted = f"{variant}." if variant else ""
        assert (tmp_path / "model" / f"model.safetensors.index.{dotted}json").exists()
        assert not list((tmp_path / "model").glob("*-of-*"))
        model = pretrained(nvme_path, tmp_path / "model", variant=variant)
        assert bits(dict(model.state_dict())) == bits(dict(other.state_dict()))


def _cut(path: Path) -> None:
    os.truncate(shard(path), shard(path).stat().st_size - 8)


def _no_header(path: Path) -> None:
    shard(path).write_bytes(b"hello")


def _no_shard(path: Path) -> None:
    shard(path).unlink()


def _no_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("{")


def _index_elsewhere(path: Path) -> None:
    edit(path / "model.safetensors.index.json", "weight_map", "model.norm.weight", "../other.safetensors")


def _index_wrong(path: Path) -> None:
    edit(path / "model.safetensors.index.json", "weight_map", "model.no.weight", shard(path).name)


def _other_shape(path: Path) -> None:
    edit(path / "config.json", "intermediate_size", 100)


def _other_layers(path: Path) -> None:
    edit(path / "config.json", "num_hidden_layers", 3)


def _quantised(path: Path) -> None:
    edit(path / "config.json", "quantization_config", {"quant_method": "gptq", "bits": 4})


def edit(path: Path, *keys: Any) -> None:
    """Set a value of a JSON file; the last of `keys` is the value."""
    document = json.loads(path.read_text())
    table = document
    for key in keys[:-2]:
        table = table[key]
    table[keys[-2]] = keys[-1]
    path.write_text(json.dumps(document))


def shard(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[2]


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (_cut, r"tensor '.*' ends beyond .*model-00003-of"),
    (_no_header, r"model-00003-of.* is not a whole safetensors file"),
    (_no_shard, r"No such file .*model-00003-of"),
    (_no_index, r"model\.safetensors\.index\.json is not an index"),
    (_index_elsewhere, r"file name '\.\./other\.safetensors' in it is not the name of a file in its directory"),
    (_index_wrong, r"says that tensor 'model\.no\.weight' is in model-00003-of.*, but it is not"),
    (_other_shape, r"layers\.0\.mlp\.down_proj\.weight is \(64, 96\) and in the model \(64, 100\).*model-00003-of"),
    (_other_layers, r"it lacks model\.layers\.2\.input_layernorm\.weight.*model-00003-of"),
    (_quantised, r"quantised model"),
]


@pytest.mark.parametrize(("breaks", "says"), BROKEN, ids=lambda value: getattr(value, "__name__", "").lstrip("_"))
def test_what_is_broken_is_an_error_with_its_name(
    breaks: Callable[[Path], None], says: str, nvme_path: Path, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "model", "llama", torch.float32)
    breaks(tmp_path / "model")
    with pytest.raises((swapper.SwapError, swapper.ConfigError), match=says):
        pretrained(nvme_path, tmp_path / "model")
    assert list(nvme_path.iterdir()) == []


WHOLE_NUMBERS = [
    *(("llama", name) for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight")),
    ("llama", "model.layers.1.self_attn.q_proj.weight"),
    *(("mixtral", f"model.layers.1.block_sparse_moe.{name}.weight") for name in ("gate", "experts.0.w2")),
    ("gpt2", "transformer.h.1.attn.c_attn.bias"),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize(("kind", "name"), WHOLE_NUMBERS)
def test_whole_numbers_are_no_weights(
    kind: str, name: str, dtype: torch.dtype, nvme_path: Path, tmp_path: Path
) -> None:
    """transformers casts them, without a word: codes whose config is lost, or a damaged header."""
    save_tiny(tmp_path / "model", kind, torch.bfloat16)
    [path] = [path for path in (tmp_path / "model").glob("*.safetensors") if name in load_file(path)]
    change(tmp_path / "model", name, load_file(path)[name].to(dtype))
    says = rf"{path.name} does not fit the model: tensor {re.escape(name)} is {dtype}, and in the model torch.bfloat16"
    with pytest.raises(swapper.SwapError, match=says):
        pretrained(nvme_path, tmp_path / "model")
    assert list(nvme_path.iterdir()) == []


def test_experts_that_do_not_fit_together_are_an_error_with_their_name(nvme_path: Path, tmp_path: Path) -> None:
    """transformers has names in a report that it logs, and none in its error."""
    save_tiny(tmp_path / "model", "mixtral", torch.float32)
    reports = transformers.modeling_utils.log_state_dict_report
    change(tmp_path / "model", "model.layers.1.block_sparse_moe.experts.2.w2.weight", torch.ones(64, 95))
    says = (
        r"safetensors does not fit the model: model\.layers\.1\.mlp\.experts\.down_proj cannot be made of .*equal size"
    )
    with pytest.raises(swapper.SwapError, match=says):
        pretrained(nvme_path, tmp_path / "model")
    assert list(nvme_path.iterdir()) == [] and transformers.modeling_utils.log_state_dict_report is reports


def test_where_nothing_is(nvme_path: Path, tmp_path: Path) -> None:
    with pytest.raises(swapper.SwapIOError, match="there is no such directory"):
        pretrained(nvme_path, tmp_path / "nothing")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(swapper.ConfigError, match="is a file; give the directory"):
        pretrained(nvme_path, tmp_path / "model.safetensors")


def test_a_file_that_changes_while_it_is_used(nvme_path: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", torch.float32)
    model = pretrained(nvme_path, tmp_path / "model")
    tokens = torch.arange(9)[None]
    model(tokens)
    with shard(tmp_path / "model").open("r+b") as file:
        file.seek(3000)
        file.write(b"other")
    with pytest.raises(swapper.SwapIOError, match="model-00003-of") as raised:
        model(tokens)
    assert raised.value.errno == errno.ESTALE


def test_other_threads_load_as_they_did(nvme_path: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", torch.float32)
    opens = transformers.modeling_utils.safe_open
    pretrained(nvme_path, tmp_path / "model")
    assert transformers.modeling_utils.safe_open is opens


def test_without_transformers_the_error_says_so(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(swapper.ConfigError, match="pip install transformers"):
        pretrained(nvme_path, tmp_path)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device_map": "balanced"}, "device_map: balanced"),
        ({"device_map": {"": "cpu", "lm_head": "disk"}}, "device_map: disk"),
        ({"device_map": "nowhere"}, "device: nowhere cannot be used"),
        ({"use_safetensors": False}, "use_safetensors"),
        ({"state_dict": {}}, "state_dict"),
        ({"model_class": "NoSuchModel"}, "model_class: transformers has no"),
        ({"model_class": nn.Linear}, "has no from_pretrained"),
        ({"model_class": transformers.LlamaConfig}, "model_class: LlamaConfig.from_pretrained makes no model"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(
    given: dict[str, Any], says: str, nvme_path: Path, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "model", "llama", torch.float32)
    with pytest.raises(swapper.ConfigError, match=says):
        pretrained(nvme_path, tmp_path / "model", **given)
    with pytest.raises(swapper.ConfigError, match="give that as model_config"):
        swapper.from_pretrained(tmp_path / "model", transformers.LlamaConfig())
