"""`OffloadedCache`: every tensor that it gives has the bits, shape and strides of a `DynamicCache`'s."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import run_program

pytest.importorskip("transformers")

from cache_pairs import SMALL, Pair, same, window_config
from each_line import at_each_line
from interrupts import interrupted_at
from isolation import alone
from pretrained import CACHE
from sampling import places
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import swapper
from swapper import ConfigError, OffloadConfig, OffloadedCache, SwapError, SwapIOError
from swapper.hf import layer_tokens, token_records
from swapper.storage.buffers import BufferPool
from swapper.storage.store import TensorStore
from swapper.storage.transfers import FailedTransfer, RecordTransfer

LAYERS = {"num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 1024}


@pytest.fixture
def config(nvme_path: Path, leaves_nothing: None) -> OffloadConfig:
    """A pool so small that most records are on the drive."""
    return OffloadConfig(nvme_path=nvme_path, pool_bytes="64KiB", bucket_bytes="16KiB")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    gc.collect()  # Files of caches that a failed test keeps.


# --- Operations in any order ---------------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_any_operations_give_the_tensors_of_a_dynamic_cache(seed: int, config: OffloadConfig) -> None:
    draw = random.Random(seed)
    pair = Pair(draw, config)
    steps = [pair.update] * 6 + [pair.crop, pair.reorder, pair.repeat, pair.select, pair.reset, pair.record_past]
    with torch.no_grad(), pair.ours:
        for _ in range(16):
            draw.choice(steps)()
            if draw.random() < 0.25:
                pair.compare()
        pair.compare()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_copies_and_calls_that_may_be_wrong_are_those_of_a_dynamic_cache(seed: int, config: OffloadConfig) -> None:
    draw = random.Random(seed)
    pair = Pair(draw, config)
    steps = [pair.update] * 4 + [pair.anything] * 6 + [pair.copied, pair.reorder, pair.record_past]
    try:
        with torch.no_grad():
            for _ in range(16):
                draw.choice(steps)()
                if pair.over:
                    break
                if draw.random() < 0.4:
                    pair.compare()
            if not pair.over or not pair.refuses():
                pair.compare()
    finally:
        pair.ours.close()


@torch.no_grad()
def test_a_window_whose_batch_grows_at_any_token(config: OffloadConfig) -> None:
    """Also when its last record is full, and half of that was dropped: new tokens have more rows than it has."""
    model = window_config([5])
    for count in range(1, 14):
        with OffloadedCache(config, model) as ours:
            plain = DynamicCache(config=model)
            for i in range(count + 2):
                if i == count:
                    ours.batch_repeat_interleave(2)
                    plain.batch_repeat_interleave(2)
                tokens = torch.randn(2, 2 if i < count else 4, 2, 1, 16)
                assert all(map(same, ours.update(*tokens, 0), plain.update(*tokens, 0)))


def test_most_of_a_long_context_is_on_the_drive(config: OffloadConfig) -> None:
    with OffloadedCache(config) as cache, torch.no_grad():
        for _ in range(2):
            for layer in range(3):
                cache.update(torch.randn(1, 2, 2000, 16), torch.randn(1, 2, 2000, 16), layer)
        stats = cache.stats()
        assert stats.stored_bytes >= 2 * 3 * 2 * 2000 * 2 * 16 * 4
        assert stats.pool_peak_bytes <= stats.pool_bytes == config.pool_bytes
        assert stats.bytes_written >= stats.stored_bytes - stats.pool_bytes
        assert stats.bytes_read >= stats.stored_bytes // 2 - stats.pool_bytes


@pytest.mark.parametrize("tokens", [1300, 3000])
@torch.no_grad()
def test_a_token_reads_what_has_no_room_and_each_layer_before_it_is_used(
    tokens: int, nvme_path: Path, leaves_nothing: None
) -> None:
    layers, record_bytes = 4, 16 << 10
    config = OffloadConfig(nvme_path=nvme_path, pool_bytes="1MiB", bucket_bytes=record_bytes)
    plain = DynamicCache()
    with OffloadedCache(config) as cache:
        records = cache._records
        for count in (tokens, *[1] * 6):
            before = cache.stats().bytes_read
            for layer in range(layers):
                new = torch.randn(2, 1, 2, count, 16)
                assert all(map(same, cache.update(*new, layer), plain.update(*new, layer)))
                (first, *_), at = records.layers[(layer + 1) % len(records.layers)], records._cache.records
                gives_way = count > 1 and next(iter(at.writes()), None) is not None  # To what is still written.
                assert at.get(first.key) is not None or gives_way, "it is there, or on its way"
            stats = cache.stats()
            assert stats.stored_bytes > config.pool_bytes == stats.pool_bytes
            most_bytes = stats.stored_bytes - config.pool_bytes + config.pool_bytes // 4 + 2 * record_bytes
            assert count > 1 or stats.bytes_read - before <= most_bytes < stats.stored_bytes
            for record in list(records._cache.records.writes()):  # They take room from what is read ahead.
                records._cache.wait(record.key)


# --- Models ---------------------------------------------------------------------------------------------------------


def made(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(1)
    match kind:
        case "llama":
            model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**SMALL, **LAYERS))
        case "qwen":
            model = Qwen2ForCausalLM(Qwen2Config(**SMALL, **LAYERS, tie_word_embeddings=True))
        case "mistral":
            model = MistralForCausalLM(MistralConfig(**SMALL, **LAYERS, sliding_window=20))
        case "some layers slide":
            kinds = ["sliding_attention", "full_attention", "sliding_attention"]
            mixed = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 20}
            model = Qwen2ForCausalLM(Qwen2Config(**SMALL, **LAYERS, **mixed))
    return model.to(dtype).eval()


def generated(model: PreTrainedModel, cache: Any, ids: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    how = {"max_new_tokens": 12, "pad_token_id": 0, **how}
    out = model.generate(ids, **{CACHE: cache}, return_dict_in_generate=True, output_logits=True, **how)
    return out.sequences, *out.logits


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "chunks": {"do_sample": False, "prefill_chunk_size": 16},
    "several": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["llama", "qwen", "mistral", "some layers slide"])
def test_generate_has_the_bits_of_a_dynamic_cache(
    kind: str, how: str, dtype: torch.dtype, config: OffloadConfig
) -> None:
    model = made(kind, dtype)
    ids = torch.randint(1, 64, (2, 150))
    padded = ids.clone()
    padded[0, :30] = 0
    mask = (padded != 0).long()
    plain = generated(model, None, padded, attention_mask=mask, **HOW[how])  # As `generate` makes it itself.
    with OffloadedCache(config) as cache:
        ours = generated(model, cache, padded, attention_mask=mask, **HOW[how])
        assert all(same(a, b) for a, b in zip(ours, plain, strict=True))
        assert cache.stats().bytes_read > 0 or any(cache.is_sliding)


def test_a_chat_goes_on_with_the_same_cache(config: OffloadConfig) -> None:
    model = made("llama")
    plain = DynamicCache(config=model.config)
    with OffloadedCache(config) as ours:
        ids = torch.randint(1, 64, (1, 50))
        for _ in range(3):
            answers = [generated(model, cache, ids, do_sample=False) for cache in (plain, ours)]
            assert all(same(a, b) for a, b in zip(*answers, strict=True))
            ids = torch.cat([answers[0][0], torch.randint(1, 64, (1, 20))], dim=1)
        ours.reset()
        again = generated(model, ours, ids, do_sample=False)
        assert all(same(a, b) for a, b in zip(again, generated(model, None, ids, do_sample=False), strict=True))


@pytest.mark.parametrize("kind", ["llama", "some layers slide"])
def test_prompts_that_begin_alike_have_copies_of_one_cache(kind: str, config: OffloadConfig) -> None:
    model = made(kind)
    begin = torch.randint(1, 64, (1, 150))
    with OffloadedCache(config) as ours, torch.no_grad():
        plain = DynamicCache(config=model.config)
        for cache in (ours, plain):
            model(begin, **{CACHE: cache})
        for _ in range(2):
            ids = torch.cat([begin, torch.randint(1, 64, (1, 9))], dim=1)
            with copy.deepcopy(ours) as copied:
                answers = [generated(model, cache, ids, do_sample=False) for cache in (copied, copy.deepcopy(plain))]
            assert all(same(a, b) for a, b in zip(*answers, strict=True))
        assert ours.get_seq_length() == 150
        with pytest.raises(SwapError, match="pickled"):
            pickle.dumps(ours)


def test_assisted_generation_crops(config: OffloadConfig) -> None:
    model, assistant = made("llama"), made("llama")
    ids = torch.randint(1, 64, (1, 60))
    how = {"do_sample": False, "assistant_model": assistant, "max_new_tokens": 20}
    plain = generated(model, DynamicCache(config=model.config), ids, **how)
    with OffloadedCache(config) as cache:
        ours = generated(model, cache, ids, **how)
    assert all(same(a, b) for a, b in zip(ours, plain, strict=True))


def test_an_encoder_decoder_has_two(config: OffloadConfig) -> None:
    torch.manual_seed(1)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    ids = torch.randint(1, 64, (2, 70))
    for how in ({"do_sample": False}, {"num_beams": 3}):
        plain = generated(model, None, ids, **how)
        with OffloadedCache(config) as itself, OffloadedCache(config) as cross:
            ours = generated(model, EncoderDecoderCache(itself, cross), ids, **how)
        assert all(same(a, b) for a, b in zip(ours, plain, strict=True))


# --- Ends and errors -------------------------------------------------------------------------------------------------


def test_a_closed_cache_refuses_and_leaves_no_file(config: OffloadConfig) -> None:
    with OffloadedCache(config) as cache, torch.no_grad():
        cache.update(torch.randn(1, 2, 500, 16), torch.randn(1, 2, 500, 16), 0)
    cache.close()
    with pytest.raises(SwapError, match="was closed"):
        cache.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)
    assert cache.stats().pool_used_bytes == 0


def test_a_cache_that_nobody_has_leaves_no_file(config: OffloadConfig, nvme_path: Path) -> None:
    cache = OffloadedCache(config)
    with torch.no_grad():
        cache.update(torch.randn(1, 2, 500, 16), torch.randn(1, 2, 500, 16), 0)
    assert list(nvme_path.iterdir())
    del cache
    gc.collect()
    assert not list(nvme_path.iterdir())


def test_a_backward_through_the_cache_is_refused(config: OffloadConfig) -> None:
    model = made("llama")
    ids = torch.randint(1, 64, (1, 30))
    plain = model(ids, **{CACHE: DynamicCache(config=model.config)}).logits
    with OffloadedCache(config) as cache:
        ours = model(ids, **{CACHE: cache}).logits
        assert same(ours.detach(), plain.detach())
        with pytest.raises(SwapError, match="no graph"):
            ours.sum().backward()


def test_what_cannot_work_is_refused_by_name(nvme_path: Path, config: OffloadConfig) -> None:
    with pytest.raises(ConfigError, match="nvme_path"):
        OffloadedCache({"pool_bytes": "1MiB", "bucket_bytes": "16KiB"})
    with pytest.raises(ConfigError, match=r"OffloadedCache\(offload_config, model.config\)"):
        OffloadedCache(LlamaConfig(**SMALL))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model_config: int is not"):
        OffloadedCache(config, 3)  # type: ignore[arg-type]
    with OffloadedCache(config) as cache, torch.no_grad():
        cache.update(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), 0)
        with pytest.raises(ValueError, match=r"keys of shape \[2, 2, 1, 16\]"):
            cache.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16), 0)
        with pytest.raises(ValueError, match="float64"):
            cache.update(torch.randn(1, 2, 1, 16).double(), torch.randn(1, 2, 1, 16).double(), 0)
        with pytest.raises(ValueError, match="crop"):
            cache.crop(3)
        with pytest.raises(IndexError):
            cache.reorder_cache(torch.tensor([4]))
        cache.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)  # Nothing has changed.
        assert cache.get_seq_length() == 6
    with OffloadedCache(config) as cache, torch.no_grad(), pytest.raises(ConfigError, match="pool_bytes: keys"):
        cache.update(torch.randn(64, 8, 1, 64), torch.randn(64, 8, 1, 64), 0)


@pytest.mark.long
def test_swapper_itself_does_not_import_transformers() -> None:
    program = "import sys, swapper; assert 'transformers' not in sys.modules"
    run_program([sys.executable, "-c", program], check=True)
    assert swapper.OffloadedCache is OffloadedCache


@pytest.mark.parametrize("kind", ["llama", "some layers slide"])
def test_check_says_the_bytes_of_a_token(kind: str, config: OffloadConfig) -> None:
    model = made(kind, torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(1, 64, (2, 50)), **{CACHE: cache})
    growing = [layer for layer in cache.layers if not layer.is_sliding]
    report = swapper.check(model, config=config)
    assert report.cache_token_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in growing) // 100
    assert report.cache_tokens > 1000
    assert "keys and values of a token" in str(report)


# --- Failures --------------------------------------------------------------------------------------------------------


def rounds(cache: Any, layers: int = 2, counts: tuple[int, ...] = (150, 1, 60)) -> list[torch.Tensor]:
    """Give a cache tokens, and reorder and crop it; give all that it gave."""
    numbers = torch.Generator().manual_seed(5)
    given = []
    for count in counts:
        for layer in range(layers):
            given += cache.update(*(torch.randn(2, 2, count, 16, generator=numbers) for _ in range(2)), layer)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-2)
    return given


def check_refuses_until_reset(cache: OffloadedCache) -> None:
    calls: list[Callable[[], object]] = [
        lambda: cache.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16), 0),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.crop(-1),
        lambda: list(cache),
    ]
    for call in calls:
        with pytest.raises(SwapError, match="of no use any more"):
            call()
    cache.reset()
    assert all(same(a, b) for a, b in zip(rounds(cache), rounds(DynamicCache()), strict=True))


@pytest.mark.parametrize("operation", ["plan", "read", "write"])
@torch.no_grad()
def test_a_failure_of_the_drive_is_raised_and_ends_the_use(
    operation: str, config: OffloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = rounds(DynamicCache())
    works = getattr(TensorStore, operation)
    left = 0
    error = SwapIOError(errno.ENOSPC if operation == "plan" else errno.EIO, operation, "record")

    def fails(self: TensorStore, *args: Any) -> object:
        nonlocal left
        left -= 1
        if left == -1:
            if operation == "plan":
                raise error
            return FailedTransfer(error)
        return works(self, *args)

    monkeypatch.setattr(TensorStore, operation, fails)
    failures = 0
    for n in places(every=2, sample=6):
        left = n
        with OffloadedCache(config) as cache:
            try:
                assert all(same(a, b) for a, b in zip(rounds(cache), plain, strict=True))
            except SwapIOError as caught:
                assert caught.errno == error.errno
                failures += 1
                left = -1
                check_refuses_until_reset(cache)
        if left >= 0:
            break
    assert failures >= 2


@pytest.mark.long
@torch.no_grad()
def test_ctrl_c_leaves_all_or_nothing_or_a_cache_that_refuses(config: OffloadConfig) -> None:
    files = "hf/token_records.py", "hf/layer_tokens.py", "hf/cache_layers.py"
    calls: list[Callable[[Any], object]] = [
        lambda cache: cache.update(*torch.ones(2, 2, 2, 90, 16), 1),
        lambda cache: cache.reorder_cache(torch.tensor([0, 0])),
        lambda cache: cache.crop(-70),
    ]
    refused = 0
    for call in calls:
        plain = []
        for done in (False, True):
            cache = DynamicCache()
            rounds(cache)
            if done:
                call(cache)
            plain.append([tensor for keys, values, _ in cache for tensor in (keys, values)])
        for n in places(every=13, sample=40):
            with OffloadedCache(config) as ours:
                rounds(ours)
                try:
                    if not interrupted_at(n, functools.partial(call, ours), *files):
                        break
                except KeyboardInterrupt:
                    pass
                try:
                    has = [tensor for keys, values, _ in ours for tensor in (keys, values)]
                except SwapError:
                    refused += 1
                    if refused % 3 == 1:
                        check_refuses_until_reset(ours)
                else:
                    assert any(all(map(same, has, each)) for each in plain), n
    assert refused > 2


@torch.no_grad()
def test_a_forked_child_can_neither_use_nor_delete(config: OffloadConfig) -> None:
    with OffloadedCache(config) as cache:
        given = rounds(cache)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                cache.crop(-1)
            except SwapError:
                cache.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        cache.reset()
        assert all(same(a, b) for a, b in zip(rounds(cache), given, strict=True))


def test_caches_in_several_threads_share_a_pool(config: OffloadConfig) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad(), OffloadedCache(config) as cache:
                for _ in range(3):
                    given = rounds(cache)
                    assert all(same(a, b) for a, b in zip(given, plain, strict=True))
                    cache.reset()
        except BaseException as error:
            failures.append(error)

    with torch.no_grad():
        plain = rounds(DynamicCache())
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("every", [1, 5, 7, 11, 13, 17, 23, 29])  # At each line most were taken at one before.
def test_another_thread_takes_the_buffers_at_any_line(every: int, config: OffloadConfig) -> None:
    """What is newer than what is stored is noted while nobody can have it evicted: keys and values were lost."""
    with torch.no_grad():
        plain = rounds(DynamicCache())
        with OffloadedCache(config) as cache:
            pool = cache._records._pool

            def reclaim_all() -> None:
                while pool.reclaim():
                    pass

            with at_each_line({token_records, layer_tokens}, reclaim_all, every=every):
                given = rounds(cache)
    assert all(same(a, b) for a, b in zip(given, plain, strict=True))


@pytest.mark.parametrize("ends", ["closed", "dropped", "reset"])
def test_a_cache_ends_while_another_thread_has_it_evict(
    ends: str, config: OffloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the other, who is about to write a record: there was a KeyError in either."""
    evicting, ended = threading.Event(), threading.Event()
    write = TensorStore.write
    failures: list[BaseException] = []

    def paused(*args: Any) -> RecordTransfer:
        if not evicting.is_set():
            evicting.set()
            ended.wait(0.5)  # Or it waits for this.
        return write(*args)

    def reclaim(pool: BufferPool) -> None:
        try:
            while pool.reclaim():
                pass
        except BaseException as error:
            failures.append(error)

    with torch.no_grad(), OffloadedCache(config) as neighbour:  # It has the pool live on.
        plain = rounds(DynamicCache())
        cache = OffloadedCache(config)
        rounds(cache)
        gc.collect()
        monkeypatch.setattr(TensorStore, "write", paused)
        pool = cache._records._pool
        thread = threading.Thread(target=reclaim, args=(pool,))
        thread.start()
        evicting.wait()
        if ends == "closed":
            cache.close()
        elif ends == "reset":
            cache.reset()
        else:
            del cache
            gc.collect()
        ended.set()
        thread.join()
        if ends == "reset":
            assert all(same(a, b) for a, b in zip(rounds(cache), plain, strict=True))
            cache.close()
        assert all(same(a, b) for a, b in zip(rounds(neighbour), plain, strict=True))
        neighbour.reset()
        assert pool.used_bytes == 0
    assert not failures, failures


# --- Memory ----------------------------------------------------------------------------------------------------------


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that this process grows by within `call`."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = read_status("VmRSS")
    call()
    return read_status("VmHWM") - before


def read_status(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


@pytest.mark.long
@pytest.mark.unsanitized("what it frees stays the process's for long")
def test_memory_is_the_pool_and_one_layer_however_long_the_context(nvme_path: Path, leaves_nothing: None) -> None:
    alone(long_contexts, nvme_path)  # Where the heap has no holes of other tests.


@torch.no_grad()
def long_contexts(nvme_path: Path) -> None:
    config = OffloadConfig(nvme_path=nvme_path, pool_bytes="8MiB", bucket_bytes="1MiB")
    layers, token_bytes = 8, 2 * 4 * 64 * 4

    def run(tokens: int) -> None:
        with OffloadedCache(config) as cache:
            for count in (tokens, 1):
                for layer in range(layers):
                    cache.update(torch.zeros(1, 4, count, 64), torch.zeros(1, 4, count, 64), layer)
            assert cache.stats().stored_bytes >= layers * tokens * token_bytes

    run(64)
    for tokens in (8192, 16384):
        # `update` has what it is given, and what it gives; and the heap keeps 32 MiB of what was given before, and has
        # holes.
        most_bytes = config.pool_bytes + 2 * tokens * token_bytes + (32 << 20) + (20 << 20)
        assert peak_bytes(functools.partial(run, tokens)) <= most_bytes < layers * tokens * token_bytes


@torch.no_grad()
def test_a_model_on_the_drive_and_its_cache_share_a_pool(nvme_path: Path, leaves_nothing: None, tmp_path: Path) -> None:
    plain = made("llama")
    plain.save_pretrained(tmp_path / "model")
    model = made("llama")
    config = OffloadConfig(
        nvme_path=nvme_path, pool_bytes="512KiB", bucket_bytes="16KiB", offload_param={"device": "nvme"}
    )
    ids = torch.randint(1, 64, (2, 300))
    swapper.offload(model, config=config)
    try:
        for how in ({"do_sample": False}, {"num_beams": 2}):
            with OffloadedCache(config) as cache:
                ours = generated(model, cache, ids, **how)
                assert cache.stats().bytes_read > 0
                assert cache.stats().pool_peak_bytes <= config.pool_bytes // 4
            assert all(same(a, b) for a, b in zip(ours, generated(plain, None, ids, **how), strict=True))
    finally:
        model.swapper.close()


OTHER_TRANSFORMERS = """
import transformers.cache_utils as names, swapper

def refused():
    try:
        swapper.OffloadedCache
    except ImportError as error:
        return "needs transformers 5.15 or newer" in str(error)

crop = names.DynamicLayer.crop
names.DynamicLayer.crop = lambda self, max_length: None
assert refused()
names.DynamicLayer.crop = crop
hybrid = vars(names).pop("LinearAttentionAndSlidingWindowAttentionLayer")
assert refused()
names.LinearAttentionAndSlidingWindowAttentionLayer = hybrid
vars(names).pop("DummyLayer", None)
swapper.OffloadedCache
"""


@pytest.mark.long
def test_a_transformers_without_what_newer_ones_have() -> None:
    """An older one crops to what a newer one crops by. What the last one for Python 3.10 has not may be absent."""
    run_program([sys.executable, "-c", OTHER_TRANSFORMERS], check=True)


WITHOUT_ACCELERATE = """
import sys
sys.modules["accelerate"] = None
import swapper
swapper.OffloadedCache
try:
    from swapper.hf import SwapCallback
except ImportError as error:
    assert "pip install transformers accelerate" in str(error)
else:
    raise AssertionError("the Trainer needs it")
"""


@pytest.mark.long
def test_the_cache_needs_no_accelerate() -> None:
    run_program([sys.executable, "-c", WITHOUT_ACCELERATE], check=True)
