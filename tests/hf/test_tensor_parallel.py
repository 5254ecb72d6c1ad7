"""Models that transformers itself shards by tensor parallelism (`tp_plan`): optimizer state on disk, to the bit."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ranks import in_processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import swapper

VOCABULARY = 128


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def train(rank: int, model_directory: str, nvme: str, checkpoints: str) -> None:
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    mesh = init_device_mesh("cpu", (2,))
    for case, (dtype, cls, options) in enumerate(
        [
            (torch.float32, torch.optim.AdamW, {}),
            (torch.bfloat16, torch.optim.AdamW, {"foreach": False}),
            (torch.float32, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        ]
    ):

        def make(
            dtype: torch.dtype = dtype, cls: Any = cls, options: Any = options, swaps: bool = True
        ) -> tuple[Any, Any]:
            model = AutoModelForCausalLM.from_pretrained(model_directory, tp_plan="auto", device_mesh=mesh, dtype=dtype)
            optimizer = cls(model.parameters(), lr=1e-2, **options)
            if swaps:
                state = {"offload_optimizer": {"device": "nvme"}, "offload_gradient": {"device": "nvme"}}
                swapper.wrap_optimizer(optimizer, {"nvme_path": nvme, "pool_bytes": "8MiB", **state})
            return model, optimizer

        (plain, reference), (model, optimizer) = make(swaps=False), make()
        assert any(isinstance(p, DTensor) for p in model.parameters())
        for step in range(4):
            for seed in range(2):
                generator = torch.Generator().manual_seed(10 * step + seed)
                ids = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
                losses = [each(input_ids=ids, labels=ids).loss for each in (plain, model)]
                assert torch.equal(*losses)
                for loss in losses:
                    loss.backward()
            for each in (reference, optimizer):
                each.step()
                each.zero_grad()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))

        def assert_same(model: Any, optimizer: Any, plain: Any = plain, reference: Any = reference) -> None:
            for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(whole(p), whole(q)), name
            expected, found = (each.state_dict()["state"] for each in (reference, optimizer))
            assert expected.keys() == found.keys()
            for number, entries in expected.items():
                assert entries.keys() == found[number].keys()
                for key, value in entries.items():
                    assert torch.equal(whole(value), whole(found[number][key])), (number, key)

        assert_same(model, optimizer)
        directory = f"{checkpoints}/{case}"
        swapper.save_checkpoint(directory, model, optimizer).wait()
        swapper.of(optimizer).close()
        model, optimizer = make()
        swapper.load_checkpoint(directory, model, optimizer)
        assert_same(model, optimizer)
        swapper.of(optimizer).close()
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_models_of_a_tp_plan_are_trained(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=False, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    in_processes(train, str(tmp_path / "model"), str(nvme_path), str(tmp_path))
