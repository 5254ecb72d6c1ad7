"""Generating from files: memory and bytes are sums, and a hard limit of memory at the sum is enough."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from launcher import run_program
from repository import BENCHMARK, ROOT

POOL_BYTES = 24 << 20
NOTED_BYTES = 128 << 10  # The file system's own, when it notes that a module or a shard is read for the first time.
ALLOWANCE_BYTES = 100 * 10**6
PROMPT, TOKENS = 32, 6
HIDDEN, INTERMEDIATE, VOCAB, HEADS = 512, 1408, 2048, 8

PROGRAM = """
import json, os, resource, sys, threading, time, torch, transformers
threading.stack_size(1 << 20)  # The limit counts stacks, and transformers loads in as many threads as it likes.
sys.path.insert(0, {benchmarks!r})
import swapper
from peak import Peak

path, nvme_path, pool_bytes, beyond_bytes, tokens, prompt = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
torch.set_num_threads(1)

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

def arrived(cache):  # What is counted when a read starts, the kernel counts when it comes to it.
    while not all(transfer.done() for record in cache.records if (transfer := record.lease.transfer) is not None):
        time.sleep(0.001)

def io():
    return {{key: int(value) for key, value in (line.split(": ") for line in open("/proc/self/io"))}}

def made(model):  # Loads what torch and transformers load at first.
    ids = torch.arange(prompt)[None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0)

with torch.inference_mode():
    tiny = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
                                    num_key_value_heads=1, vocab_size=2048, eos_token_id=None, dtype="bfloat16")
    made(transformers.AutoModelForCausalLM.from_config(tiny))
config = swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes=pool_bytes, offload_param={{"device": "nvme"}})
before_bytes = status("RssAnon") + status("RssShmem")
limit = status("VmData") + pool_bytes + beyond_bytes
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
rounds = []
with Peak() as peak, torch.inference_mode():
    model = swapper.from_pretrained(path, config)
    owner = model.swapper
    stored_bytes = sum(owner._store.stored_bytes(held.key) for held in owner._all)
    spans = sum(len(held.plan.spans) for held in owner._all)
    largest = sorted(held.length_bytes for held in owner._all)[-2:]
    ids, cache, logits = torch.arange(prompt)[None], None, []
    arrived(owner._cache)
    at_first, counted = io(), owner.metrics.bytes_read
    for _ in range(tokens):
        out = model(ids, {cache}=cache, use_cache=True)
        cache, ids = out["{cache}"], out.logits[:, -1].argmax(-1, keepdim=True)
        logits.append(out.logits[:, -1].float().tolist()[0])
        rounds.append(owner.metrics.bytes_read - counted)
        counted += rounds[-1]
    arrived(owner._cache)
of_kernel = {{key: value - at_first[key] for key, value in io().items()}}
print(json.dumps(dict(peak=peak.bytes - before_bytes, rounds=rounds, stored=stored_bytes, spans=spans, largest=largest,
                      budget=owner._budget_bytes, counted_written=owner.metrics.bytes_written, logits=logits,
                      of_kernel=of_kernel)))
"""


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [24, 48])
def test_memory_and_bytes_of_a_generation_are_sums(layers: int, nvme_path: Path, tmp_path: Path) -> None:
    """Of 156 and of 309 MB: the peak is that of the pool, the cache, a layer, and 100 MB; and nothing is written."""
    transformers = pytest.importorskip("transformers")
    from pretrained import CACHE

    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        eos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="60MB")
    cache_bytes = 2 * 2 * layers * (PROMPT + TOKENS) * HIDDEN
    layer_bytes = 4 * PROMPT * (3 * INTERMEDIATE + 8 * HIDDEN + 2 * VOCAB)
    beyond_bytes = cache_bytes + layer_bytes + ALLOWANCE_BYTES
    program = PROGRAM.format(benchmarks=str(BENCHMARK.parent), cache=CACHE)
    numbers = map(str, (POOL_BYTES, beyond_bytes, TOKENS, PROMPT))
    command = [sys.executable, "-B", "-c", program, str(tmp_path), str(nvme_path), *numbers]
    # oneDNN asks for aligned memory in each product. Of its heap glibc gives that anew, and takes heap or mappings for
    # it by what was freed before.
    mapped = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    ended = run_program(command, capture_output=True, text=True, cwd=ROOT, env=mapped)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])

    assert sum(p.nbytes for p in model.parameters()) > 150e6 > POOL_BYTES + beyond_bytes
    assert result["peak"] <= POOL_BYTES + beyond_bytes
    beyond_pool_bytes = result["stored"] - result["budget"]
    for counted in result["rounds"][1:]:
        assert counted <= beyond_pool_bytes + sum(result["largest"]) + 8192 * result["spans"]
    assert abs(sum(result["rounds"]) - result["of_kernel"]["read_bytes"]) < result["largest"][-1]
    assert result["rounds"][0] <= result["stored"] + sum(result["largest"])
    assert result["counted_written"] == 0
    assert result["of_kernel"]["write_bytes"] <= NOTED_BYTES < result["largest"][0]

    ids, cache, logits = torch.arange(PROMPT)[None], None, []
    with torch.inference_mode():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for _ in range(TOKENS):
            out = model(ids, **{CACHE: cache}, use_cache=True)
            cache, ids = out[CACHE], out.logits[:, -1].argmax(-1, keepdim=True)
            logits.append(out.logits[:, -1].float().tolist()[0])
        torch.set_num_threads(threads)
    assert result["logits"] == logits
