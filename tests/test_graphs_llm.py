"""Passes of `zinfer.LLM` that carry a token of a few texts each, replayed: equal tokens, and few forms."""

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
from zinfer.batching.decode_bucket import DecodeBucket, find_form
from zinfer.batching.ragged import BatchBuilder
from zinfer.graphs.forward_graphs import FIRST
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
        assert (counts.captured, counts.replayed) == (1, 2 * (NUM_NEW - 1) - 1), counts
        found = llm.generate(by_ids(prompts), GREEDY)
        assert [completion.token_ids for completion in found] == alone
        # 13 texts are filled up to 16.
        assert (counts.captured, counts.eager[FIRST]) == (2, 2), counts
        lengths = [SamplingParams(max_new_tokens=1 + number % NUM_NEW) for number in range(len(prompts))]
        for completion, wanted in zip(llm.generate(by_ids(prompts), lengths), alone, strict=True):
            assert completion.token_ids == wanted[: len(completion.token_ids)]
        assert counts.captured <= 5, "16, 8, 4, 2 and 1 rows"
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


@pytest.mark.sampled(2)
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
            assert (llm.graphs.captured, llm.graphs.replayed) == (1, 2 * (NUM_NEW - 1) - 1), llm.graphs


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
)
def test_forms_hold_their_passes(lengths: list[int], page_size: int, is_prompt: int) -> None:
    texts = [text_of(number, length, list(range(-(-length // page_size)))) for number, length in enumerate(lengths)]
    chunks = [Chunk(text, length - 1, length, True) for text, length in zip(texts, lengths, strict=True)]
    form = find_form(chunks, page_size)
    assert (form is None) == (len(chunks) > 64)
    if is_prompt < len(chunks) and lengths[is_prompt] > 1:
        several = [*chunks]
        several[is_prompt] = chunks[is_prompt]._replace(begin=lengths[is_prompt] - 2)
        assert find_form(several, page_size) is None
        several[is_prompt] = chunks[is_prompt]._replace(samples=False)
        assert find_form(several, page_size) is None
    if form is None:
        return
    assert len(chunks) <= form.num_rows < len(chunks) + 8
    assert find_form(chunks, page_size, form.num_rows) == form
    assert find_form(chunks, page_size, form.num_rows - 1) is None, "of two parts"
    assert max(lengths) <= form.num_pages * page_size < 2 * max(1024, *lengths) + page_size
    batch = BatchBuilder(page_size, torch.device("cpu")).build(Chunks(chunks), form=form)
    (part,) = batch.parts
    assert part.layout.page_table.shape == (form.num_rows, form.num_pages)
    assert part.layout.num_decodes == form.num_rows == batch.num_tokens
    assert part.layout.most_context == form.num_pages * page_size
    assert batch.wanted.tolist() == list(range(form.num_rows))
    assert part.layout.context_lengths.tolist() == lengths + lengths[-1:] * (form.num_rows - len(lengths))
    plain = BatchBuilder(page_size, torch.device("cpu")).build(Chunks(chunks))
    assert torch.equal(part.places[: len(chunks)], plain.parts[0].places)
    assert set(part.places[len(chunks) :].tolist()) <= {int(plain.parts[0].places[-1])}


def test_forms_are_few() -> None:
    text = text_of(0, 9, [0])
    forms = {find_form([Chunk(text, 8, 9, True)] * count, 64) for count in range(1, 65)}
    assert forms == {DecodeBucket(count, 16) for count in (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)}
