"""Pages at home in host memory: a layer that computes has its own and current ones, however late the copies come."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from races_support import late_streams
from ragged_models import FAMILIES, Reference, spoil, spoil_slots, tiny_model

import zinfer
from zinfer.errors import PlanError
from zinfer.kv_cache.host import HostedKVCache
from zinfer.model.spec import KVShape, ModelSpec
from zinfer.scheduling.schedule import Chunk
from zinfer.scheduling.sequence import Sequence as TokenSequence

NUM_LAYERS = 5
"""More than there are slots, which do not divide them."""


class SpoiltKVCache(HostedKVCache):
    """Slots hold nothing between passes: what a layer reads has come for it."""

    def expect(self, chunks: Sequence[Chunk]) -> None:
        self.arrive()
        spoil_slots(self)
        super().expect(chunks)


def references(family: str, lengths: Sequence[int]) -> Reference:
    model = tiny_model(family, NUM_LAYERS)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    reference = Reference(model, prompts, num_new=6)
    assert len({token for tokens in reference.tokens for token in tokens}) > 4, "a text that says nothing"
    return reference


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gpt2", "deepseek_v3", "bloom", "falcon-alibi"),
        *("mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen2", "starcoder2"),  # with windows
    ],
)
def test_tokens_are_those_of_each_prompt_alone(family: str, device: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    reference = references(family, (1, 9, 40, 90))
    tiny_model(family, NUM_LAYERS).save_pretrained(tmp_path)
    for home in ("none", "nvme"):
        config = {"zero_optimization": {"offload_param": {"device": home}}}
        engine = zinfer.init_inference(tmp_path, config, device=device)
        make = partial(SpoiltKVCache, windows=ModelSpec.read(engine.module.config).attention_windows)
        reference.check(engine, chunk=1000, page_size=128, make_cache=make)
        reference.check(engine, chunk=64, page_size=16, most_part_tokens=50, make_cache=partial(make, gap_bytes=0))
        reference.check(engine, chunk=7, page_size=4, most_part_tokens=5, make_cache=partial(make, synchronous=True))
        engine.destroy()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", NUM_LAYERS).save_pretrained(folder)
    return references("llama", (1, 9, 40)), folder


@given(
    chunk=st.sampled_from([5, 20, 1000]),
    page_size=st.sampled_from([1, 4, 16]),
    most_part_tokens=st.sampled_from([None, 5, 30]),
    gap_bytes=st.sampled_from([0, 2000, 1 << 20]),
    queued=st.booleans(),
    synchronous=st.booleans(),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_late_copies_change_nothing(
    llama: tuple[Reference, Path],
    device: str,
    chunk: int,
    page_size: int,
    most_part_tokens: int | None,
    gap_bytes: int,
    queued: bool,
    synchronous: bool,
    seed: int,
) -> None:
    reference, folder = llama
    with late_streams(device, seed, queued=queued) as (open_stream, opened):
        engine = zinfer.init_inference(folder, device=device)
        make = partial(HostedKVCache, open_stream=open_stream, gap_bytes=gap_bytes, synchronous=synchronous)
        sizes: dict[str, Any] = {"chunk": chunk, "page_size": page_size, "most_part_tokens": most_part_tokens}
        reference.check(engine, make_cache=make, **sizes)
        engine.destroy()
        assert not any(stream.num_under_way for stream in opened), "memory is given back while it is copied"


SHAPE = KVShape(NUM_LAYERS, 1, 4, 4)


def cache_of(num_pages: int, device: str = "cpu", **options: Any) -> HostedKVCache:
    return HostedKVCache(SHAPE, num_pages, 4, torch.float32, torch.device(device), gap_bytes=0, **options)


def chunk_of(begin: int, end: int, pages: list[int]) -> Chunk:
    return Chunk(TokenSequence(0, (5,) * end, 1, pages=pages), begin, end, True)


def compute(cache: HostedKVCache, layer: int, number: float, pages: list[int]) -> list[float]:
    """Write a number to pages of a layer; gives what these held."""
    cache.fetch_layer(layer)
    held = cache.layers[layer]
    assert held is not None
    found = held.keys[pages, 0, 0, 0].tolist()
    held.keys[pages] = number
    held.values[pages] = number
    cache.release_layer(layer)
    assert cache.layers[layer] is None
    return found


@pytest.mark.parametrize("synchronous", [False, True])
def test_every_layer_has_its_own_pages_and_bytes_are_counted(device: str, synchronous: bool) -> None:
    cache = cache_of(8, device, synchronous=synchronous)
    spoil(cache)
    cache.expect([chunk_of(0, 12, [0, 1, 2])])
    for layer in range(NUM_LAYERS):
        compute(cache, layer, 10.0 + layer, [0, 1, 2])
    page_bytes = 2 * 4 * 4 * 4 * NUM_LAYERS
    assert (cache.bytes_to_device, cache.bytes_to_host) == (0, 3 * page_bytes)
    for number in range(3):
        cache.expect([chunk_of(11, 12, [0, 1, 2])])
        found = [compute(cache, layer, 20.0 + layer, [2]) for layer in range(NUM_LAYERS)]
        assert found == [[(20.0 if number else 10.0) + layer] for layer in range(NUM_LAYERS)]
    assert (cache.bytes_to_device, cache.bytes_to_host) == (9 * page_bytes, 6 * page_bytes)
    cache.arrive()
    assert [home[1][:3, 0, 0, 0].tolist() for home in cache._homes] == [
        [10.0 + layer, 10.0 + layer, 20.0 + layer] for layer in range(NUM_LAYERS)
    ]
    cache.close()
    cache.close()


def test_a_layer_moves_ahead_while_one_computes_and_the_twin_moves_nothing_ahead() -> None:
    for synchronous, ahead in ((False, [0, 1, 2]), (True, [])):
        cache = cache_of(8, synchronous=synchronous)
        cache.expect([chunk_of(3, 4, [0])])
        assert list(cache._filling) == ahead
        compute(cache, 0, 1.0, [0])
        assert list(cache._filling) == ([1, 2, 3] if ahead else [])
        cache.close()


def walk_until(cache: HostedKVCache, cut_at: str, layer: int, patched: pytest.MonkeyPatch) -> None:
    """A pass that Ctrl-C ends."""

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    if cut_at == "expect":
        patched.setattr(cache._coming, "mark", interrupted)
    cache.expect([chunk_of(7, 8, [0, 1])])
    for each in range(layer):
        compute(cache, each, 99.0, [0, 1])
    if cut_at == "fetch_layer":
        patched.setattr(cache._coming, "join", interrupted)
    if cut_at == "release_layer":
        patched.setattr(cache._going, "copy", interrupted)
    cache.fetch_layer(layer)
    if cut_at == "compute":
        raise KeyboardInterrupt
    cache.release_layer(layer)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("cut_at", ["expect", "fetch_layer", "compute", "release_layer"])
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_pass_that_is_cut_short_spoils_no_later_one(
    queued: bool, cut_at: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late_streams("cpu", 7, queued=queued) as (open_stream, opened):
        cache = cache_of(8, open_stream=open_stream)
        for _ in range(3):
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                walk_until(cache, cut_at, layer, patched)
            for number in (1.0, 2.0):
                cache.expect([chunk_of(0, 8, [1, 0])] if number == 1.0 else [chunk_of(7, 8, [1, 0])])
                found = [compute(cache, each, number + each, [0, 1]) for each in range(NUM_LAYERS)]
            assert found == [[1.0 + each] * 2 for each in range(NUM_LAYERS)]
        cache.close()
        assert not any(stream.num_under_way for stream in opened)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float16])
@pytest.mark.parametrize("values_in_keys", [False, True])
def test_pages_of_codes_and_of_latents_come_and_go_whole(dtype: torch.dtype, values_in_keys: bool) -> None:
    shape = KVShape(NUM_LAYERS, 1 if values_in_keys else 2, 8, 4 if values_in_keys else 8, values_in_keys)
    cache = HostedKVCache(shape, 6, 4, dtype, torch.device("cpu"))
    token_bytes = shape.token_bytes(dtype)
    assert 6 * 4 * token_bytes <= cache.host_bytes < 6 * 4 * token_bytes + 4 * NUM_LAYERS * 4096
    cache.expect([chunk_of(0, 24, [0, 1, 2, 3, 4, 5])])
    wanted = []
    generator = torch.Generator().manual_seed(1)
    for layer in range(NUM_LAYERS):
        cache.fetch_layer(layer)
        held = cache.layers[layer]
        assert held is not None
        for part in held.parts():
            bits = part.view(torch.uint8)
            bits.copy_(torch.randint(0, 100, bits.shape, generator=generator))
        wanted.append([part.view(torch.uint8).clone() for part in held.parts()])
        cache.release_layer(layer)
    cache.expect([chunk_of(23, 24, [0, 1, 2, 3, 4, 5])])
    for layer in range(NUM_LAYERS):
        cache.fetch_layer(layer)
        held = cache.layers[layer]
        assert held is not None
        assert all(
            torch.equal(part.view(torch.uint8), old) for part, old in zip(held.parts(), wanted[layer], strict=True)
        )
        cache.release_layer(layer)
    assert cache.bytes_to_device == 24 * token_bytes
    assert cache.bytes_to_host == (24 + 4) * token_bytes
    cache.close()


def test_more_than_a_registration_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.kv_cache.host.MOST_REGISTERED_BYTES", 500)
    with pytest.raises(PlanError, match=r"keys in all pages take 512 B.* lower zinfer\.kv_cache_memory"):
        cache_of(8)
