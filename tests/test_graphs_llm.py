"""Passes of `zinfer.LLM` that carry a token of a few texts each, replayed: equal tokens, and few forms."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from graph_support import stand_in
from hypothesis import given
from hypothesis import strategies as st
from llm_support import NUM_NEW, alone, by_ids, folder, prompts
from ragged_models import tiny_model

from zinfer import LLM, SamplingParams
from zinfer.batching.pass_bucket import PassBucket, find_bucket
from zinfer.batching.ragged import BatchBuilder
from zinfer.graphs import forward_graphs
from zinfer.graphs.forward_graphs import FIRST
from zinfer.scheduling.latency_target import LatencyTarget
from zinfer.scheduling.schedule import Chunk, Chunks
from zinfer.scheduling.sequence import Sequence as TokenSequence

__all__ = ["alone", "folder", "prompts", "stand_in"]  # fixtures

COPYING = ("bloom",)
"""Whose code copies from the CPU in each forward."""
GREEDY = SamplingParams(max_new_tokens=NUM_NEW)


@pytest.fixture
def open_llm(stand_in: object, device: str) -> Callable[..., LLM]:
    return partial(LLM, device=device, enable_cuda_graph=True, kv_cache_memory="2MB")


def test_tokens_are_those_alone(
    folder: Path, prompts: list[list[int]], alone: list[tuple[int, ...]], open_llm: Callable[..., LLM]
) -> None:
    with open_llm(folder, kv_page_size=8) as llm:
        for prompt, wanted in zip(prompts[:2], alone[:2], strict=True):  # one by one
            assert llm.generate(by_ids([prompt]), GREEDY)[0].token_ids == wanted
        counts = llm.graphs
        assert (counts.captured, counts.replayed) == (2, 2 * NUM_NEW - 2), counts
        found = llm.generate(by_ids(prompts), GREEDY)
        assert [completion.token_ids for completion in found] == alone
        # 13 texts are filled up to 16, and their prompts to more tokens than one alone.
        assert (counts.captured, counts.eager[FIRST]) == (3, 4), counts
        lengths = [SamplingParams(max_new_tokens=1 + number % NUM_NEW) for number in range(len(prompts))]
        for completion, wanted in zip(llm.generate(by_ids(prompts), lengths), alone, strict=True):
            assert completion.token_ids == wanted[: len(completion.token_ids)]
        assert counts.captured <= 7, "16, 8, 4, 2 and 1 rows, one prompt and all of them"
        assert llm.stats().passes == len(llm._batcher.pass_sizes) + 3 * NUM_NEW


def test_rare_forms_are_left_to_python(folder: Path, prompts: list[list[int]], stand_in: object, device: str) -> None:
    """A capture takes as long as many replays save; the last passes of a job have other numbers of rows each."""
    with LLM(folder, device=device, kv_cache_memory="2MB", speculate="off") as llm:
        llm.generate(by_ids(prompts), [SamplingParams(max_new_tokens=1 + number % NUM_NEW) for number in range(13)])
        counts = llm.graphs
        assert counts.captured == 0 < counts.eager[FIRST], counts
        for _ in range(2):
            llm.generate(by_ids(prompts[:1]), GREEDY)
        assert counts.captured == 1 < counts.replayed, counts
    with LLM(folder, device=device, kv_cache_memory="2MB", speculate="off", interactive=True) as llm:
        llm.generate(by_ids(prompts[:1]), GREEDY)
        assert (llm.graphs.captured, llm.graphs.replayed) == (1, NUM_NEW - 2), "somebody waits for each token"


def test_captures_tell_a_latency_nothing(
    folder: Path, prompts: list[list[int]], open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(LatencyTarget, "observe", lambda target, num_tokens, seconds: sizes.append(num_tokens))
    with open_llm(folder, max_token_latency="100s") as llm:
        # The first pass of a call ends after no other one; the first decode is launched by Python, the next captured.
        for num_observed in (NUM_NEW - 3, NUM_NEW - 1):
            sizes.clear()
            llm.generate(by_ids(prompts[:1]), GREEDY)
            assert sizes == [1] * num_observed


def test_a_form_whose_graph_was_dropped_has_to_recur(
    folder: Path, prompts: list[list[int]], open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_graphs, "_MOST_GRAPHS", 1)
    with open_llm(folder) as llm:
        graphs = llm._graphs
        assert graphs is not None
        graphs.patience = 3
        for count, num_captured in ((1, 1), (2, 2), (1, 3)):
            before = sum(graphs.counts.eager.values())
            llm.generate(by_ids(prompts[:count]), GREEDY)
            # Its prompts are a form of their own, which is rare.
            assert sum(graphs.counts.eager.values()) - before == 1 + graphs.patience
            assert graphs.counts.captured == num_captured


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", ["gpt2", "bloom", "mistral", "gemma2", "deepseek_v2", "mixtral"])
def test_families(family: str, tmp_path: Path, open_llm: Callable[..., LLM], device: str) -> None:
    folder = tmp_path / family
    tiny_model(family).save_pretrained(folder)
    ids = by_ids([[5, 9, 17], [33, 4, 8, 12, 60, 2, 99]])
    with LLM(folder, device=device, kv_cache_memory="2MB") as plain:
        wanted = [completion.token_ids for completion in plain.generate(ids, GREEDY)]
    with open_llm(folder) as llm:
        for _ in range(2):
            assert [completion.token_ids for completion in llm.generate(ids, GREEDY)] == wanted
        if device == "cuda" and family in COPYING:
            assert any("cannot be captured" in reason for reason in llm.graphs.eager), llm.graphs
        else:
            assert (llm.graphs.captured, llm.graphs.replayed) == (2, 2 * NUM_NEW - 2), llm.graphs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_codes_and_drawn_tokens(
    folder: Path, prompts: list[list[int]], open_llm: Callable[..., LLM], device: str, dtype: str
) -> None:
    params = [SamplingParams(max_new_tokens=NUM_NEW, temperature=0.9, seed=seed) for seed in range(5)]
    config = {"kv_cache_dtype": dtype}
    with LLM(folder, device=device, kv_cache_memory="2MB", **config) as plain:
        wanted = [completion.token_ids for completion in plain.generate(by_ids(prompts[:5]), params)]
    with open_llm(folder, **config) as llm:
        for _ in range(2):
            assert [each.token_ids for each in llm.generate(by_ids(prompts[:5]), params)] == wanted
        assert llm.graphs.replayed > NUM_NEW


def text_of(number: int, length: int, pages: list[int]) -> TokenSequence:
    return TokenSequence(number, (5,) * length, 1, pages=pages)


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=70),
    page_size=st.sampled_from([1, 16, 64]),
    is_prompt=st.integers(0, 100),
    most_tokens=st.sampled_from([0, 79, 80, 2000]),
)
def test_buckets_hold_their_passes(lengths: list[int], page_size: int, is_prompt: int, most_tokens: int) -> None:
    texts = [text_of(number, length, list(range(-(-length // page_size)))) for number, length in enumerate(lengths)]
    chunks = [Chunk(text, length - 1, length, True) for text, length in zip(texts, lengths, strict=True)]
    bucket = find_bucket(Chunks(chunks), page_size, most_tokens)
    assert (bucket is None) == (len(chunks) > 64 and most_tokens < 80), "80 rows with padding"
    if is_prompt < len(chunks) and lengths[is_prompt] > 1:
        several = [*chunks]
        several[is_prompt] = chunks[is_prompt]._replace(begin=lengths[is_prompt] - 2)
        assert find_bucket(Chunks(several), page_size) is None
        several[is_prompt] = chunks[is_prompt]._replace(samples=False)
        assert find_bucket(Chunks(several), page_size) is None
    if bucket is None:
        return
    assert len(chunks) <= bucket.num_segments < len(chunks) + (8 if len(chunks) <= 64 else 16)
    assert find_bucket(Chunks(chunks), page_size, most_tokens, bucket.num_segments) == bucket
    assert find_bucket(Chunks(chunks), page_size, most_tokens, bucket.num_segments - 1) is None, "of two parts"
    assert max(lengths) <= bucket.num_pages * page_size < 2 * max(1024, *lengths) + page_size
    batch = BatchBuilder(page_size, torch.device("cpu")).build(Chunks(chunks), bucket=bucket)
    (part,) = batch.parts
    assert part.layout.page_table.shape == (bucket.num_segments, bucket.num_pages)
    assert part.layout.num_decodes == bucket.num_segments == batch.num_tokens
    assert part.layout.most_context == bucket.num_pages * page_size
    assert batch.wanted.tolist() == list(range(bucket.num_segments))
    assert part.layout.context_lengths.tolist() == lengths + lengths[-1:] * (bucket.num_segments - len(lengths))
    plain = BatchBuilder(page_size, torch.device("cpu")).build(Chunks(chunks))
    assert torch.equal(part.places[: len(chunks)], plain.parts[0].places)
    assert set(part.places[len(chunks) :].tolist()) <= {int(plain.parts[0].places[-1])}


def test_decodes_are_still_known_in_a_bucket() -> None:
    """Their tokens are then read without an object for each chunk, which took most of a pass's time on the host."""
    chunks = Chunks.of_decodes([text_of(number, 5, [number]) for number in range(60)])
    chunks.append(Chunk(text_of(60, 9, [60]), 4, 9, False))
    bucket = find_bucket(chunks, 16, 1024)
    assert bucket is not None
    filled = bucket.fill(chunks)
    assert (filled.num_decodes, len(chunks)) == (60, 61)
    assert [*filled][:61] == [*chunks]
    assert sum(chunk.end - chunk.begin for chunk in filled) == bucket.num_tokens == 128


@given(
    texts=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=20),
    page_size=st.sampled_from([1, 16, 64]),
    most_tokens=st.sampled_from([0, 100, 2000]),
)
def test_buckets_hold_passes_with_prompts(texts: list[tuple[int, int]], page_size: int, most_tokens: int) -> None:
    lengths = [max(each) for each in texts]
    begins = itertools.accumulate((-(-length // page_size) for length in lengths), initial=0)
    pages = [list(range(one, two)) for one, two in itertools.pairwise(begins)]
    several = [text_of(number, length, held) for number, (length, held) in enumerate(zip(lengths, pages, strict=True))]
    chunks = [
        Chunk(text, length - min(each), length, min(each) % 2 == 0)
        for text, length, each in zip(several, lengths, texts, strict=True)
    ]
    if all(chunk.samples and chunk.end - chunk.begin == 1 for chunk in chunks):
        return
    num_tokens = sum(chunk.end - chunk.begin for chunk in chunks)
    bucket = find_bucket(Chunks(chunks), page_size, most_tokens)
    if bucket is None:
        # Few tokens of many chunks would be repeated too often, one by one.
        assert num_tokens > min(most_tokens, 1024) // 2 or max(lengths) < 16
        return
    assert num_tokens <= bucket.num_tokens <= min(max(2 * num_tokens, 64), most_tokens)
    builder = BatchBuilder(page_size, torch.device("cpu"))
    batch, plain = builder.build(Chunks(chunks), bucket=bucket), builder.build(Chunks(chunks))
    (part,), (own,) = batch.parts, plain.parts
    assert batch.num_tokens == part.layout.most_queries == bucket.num_tokens
    assert part.layout.num_decodes is None
    known, found = (
        list(zip(each.input_ids[0].tolist(), each.position_ids[0].tolist(), each.parts[0].places.tolist(), strict=True))
        for each in (plain, batch)
    )
    assert found[:num_tokens] == known
    assert set(found) == set(known), "others are repeated"
    assert batch.wanted[: len(plain.wanted)].equal(plain.wanted)
    layout, count = part.layout, len(chunks)
    assert len(batch.wanted) == len(layout.context_lengths) == bucket.num_segments
    assert layout.query_starts[: count + 1].equal(own.layout.query_starts)
    assert layout.context_lengths[:count].equal(own.layout.context_lengths)
    sizes = layout.query_starts.diff()
    assert int(sizes.sum()) == bucket.num_tokens
    assert layout.page_table.shape == (bucket.num_segments, bucket.num_pages)


def test_buckets_are_few() -> None:
    text = text_of(0, 9, [0])
    decode = Chunk(text, 8, 9, True)
    buckets = {find_bucket(Chunks([decode] * count), 64, 5000) for count in range(1, 1025)}
    few = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    many = (*range(80, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
    assert buckets == {PassBucket(count, count, 16, count) for count in (*few, *many)}
    assert find_bucket(Chunks([decode] * 1025), 64, 5000) is None
    prompt = Chunk(text, 0, 9, True)
    mixed = [find_bucket(Chunks([*[decode] * count, prompt]), 64, 5000) for count in range(1016)]
    assert {bucket and bucket.num_tokens for bucket in mixed} == {64, 128, 256, 512, 1024}
    assert {bucket and bucket.num_segments for bucket in mixed} == {16, 64, 128, 256, 512, 1024}
    assert len(set(mixed)) < 16
