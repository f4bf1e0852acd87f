"""Guesses of next tokens: the text is the same whatever is guessed, in fewer passes the better the guesses are."""

import shutil
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoints import random_prompts, tiny_checkpoint
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs_support import letters_model
from llm_support import token_bytes
from lockstep_support import one_thread
from paged_engine import HostedEngine
from ranks_support import run_ranks
from test_lockstep import in_lockstep
from test_scheduler_workloads import NUM_WORKLOADS, ROOMS, ROWS, Room, Row, Workload
from threads import settled_threads

from zinfer import LLM, Completion, SamplingParams, StructuredOutputsParams
from zinfer.batching.draft_model import DraftModel, check_vocabulary
from zinfer.batching.speculating import open_speculation
from zinfer.batching.verification import rounds
from zinfer.config import resolve_settings
from zinfer.errors import CheckpointError, ConfigError
from zinfer.requests.completion import CompletionDelta
from zinfer.sampling.sampler import BROKEN, Sampled
from zinfer.scheduling.ngram_drafter import NGramDrafter, look_up
from zinfer.scheduling.sequence import Sequence as TokenSequence
from zinfer.scheduling.speculation import MOST_TOKENS, Speculation

SIZES: dict[str, Any] = {"device": "cpu", "kv_page_size": 8, "kv_cache_memory": "2MB"}
GUESSES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5).map(tuple)


def looked_up(tokens: list[int], most: int) -> tuple[int, ...]:
    """The definition, by trying each place."""
    for length in (4, 3, 2):
        for place in range(len(tokens) - length - 1, -1, -1):
            if len(tokens) > length and tokens[place : place + length] == tokens[-length:]:
                following = list(tokens)
                for at in range(most):
                    following.append(following[place + length + at])
                return tuple(following[len(tokens) :])
    return ()


@given(tokens=st.lists(st.sampled_from([0, 1, 2, 256, 65_536, 2**24 + 1]), max_size=30), most=st.integers(1, 40))
def test_what_followed_before_is_guessed_to_follow_again(tokens: list[int], most: int) -> None:
    assert look_up(array("i", tokens).tobytes(), most) == looked_up(tokens, most)


def test_a_drafter_follows_its_sequences() -> None:
    drafter = NGramDrafter()
    first, second = TokenSequence(0, [1, 2, 3, 4, 9, 2], 10), TokenSequence(1, [5, 6, 7], 10)
    assert drafter.guess([first, second], 3) == {}
    first.output_ids += [3]
    assert drafter.guess([first, second], 3) == {0: (4, 9, 2)}
    first.output_ids += [7, -1]  # the last one is pending
    second.output_ids += [5, 6]
    assert drafter.guess([second], 3) == {1: (7, 5, 6)}
    first.output_ids[:] = [2, 3]  # it was restarted
    assert drafter.guess([first], 2) == {0: (4, 9)}


SWAPPED_AT_THE_END = [
    Row(0, 0, 1, 0, 8, 8, 0, None, is_background=True),
    Row(0, 0, 1, 0, 40, 1, 0, None),
    Row(0, 0, 1, 0, 3, 3, 0, None, is_background=True),
    Row(0, 16, 6, 0, 12, 12, 0, None),
]
"""The third one is swapped out while a pass verifies its last guess."""
SWAPPED_WITH_ALL = [row if number != 2 else replace(row, end_after=4) for number, row in enumerate(SWAPPED_AT_THE_END)]
"""Likewise, but it ends because it may have no more tokens."""


@given(rows=st.lists(ROWS, min_size=1, max_size=8), room=ROOMS, guesses=GUESSES)
@settings(max_examples=NUM_WORKLOADS // 2)
def test_every_sequence_says_what_it_says_without_guesses(
    rows: list[Row], room: Room, guesses: tuple[tuple[int, int], ...]
) -> None:
    Workload(rows, room, guesses=guesses).run()
    Workload(rows, room, guesses=guesses, engine=HostedEngine, lends=True).run()


@given(rows=st.lists(ROWS, min_size=1, max_size=8), room=ROOMS, guesses=GUESSES, num_sets=st.integers(2, 4))
@example(rows=SWAPPED_AT_THE_END, room=Room(16, 0, 2, 2, None, "arrival", None), guesses=((1, 0),), num_sets=2)
@example(rows=SWAPPED_WITH_ALL, room=Room(16, 0, 2, 2, None, "arrival", None), guesses=((1, 0),), num_sets=2)
@settings(max_examples=NUM_WORKLOADS // 2)
def test_sets_in_flight_verify_guesses_too(
    rows: list[Row], room: Room, guesses: tuple[tuple[int, int], ...], num_sets: int
) -> None:
    Workload(rows, room, guesses=guesses, num_sets=num_sets).run()


def test_right_guesses_save_passes() -> None:
    rows = [Row(0, 0, 20, number % 3, 40, 60, 0, None) for number in range(6)]
    plain, guessed = (
        Workload(rows, Room(16, 1500, 300, 20, None, "arrival", None), guesses=each) for each in ((), ((4, 0),))
    )
    plain.run()
    guessed.run()
    assert len(plain.compositions) == 40
    assert len(guessed.compositions) == 1 + -(-39 // 5)
    assert guessed.num_accepted == 6 * (39 - 8)


class Oracle:
    """Guesses from known outputs, with every so manieth token wrong."""

    def __init__(self, texts: Sequence[Sequence[int]], every: int) -> None:
        self._texts, self._every = [array("i", each) for each in texts], every

    def guess(self, sequences: Sequence[TokenSequence], most: int) -> Mapping[int, tuple[int, ...]]:
        found = {}
        for each in sequences:
            tokens = each.tokens(0, each.num_tokens)
            text = next((text for text in self._texts if text[: len(tokens)] == tokens), tokens)
            following = text[len(tokens) : len(tokens) + most]
            found[each.number] = tuple(
                token if (at + len(tokens)) % self._every else (token + 1) % 100 for at, token in enumerate(following)
            )
        return found


def given_params() -> list[SamplingParams]:
    """Of all kinds."""
    sampled = {"temperature": 0.8, "max_new_tokens": 30}
    return [
        SamplingParams(max_new_tokens=37),
        SamplingParams(**sampled, seed=1),
        SamplingParams(**sampled, seed=2, top_p=0.9, top_k=20, min_p=0.01),
        SamplingParams(**sampled, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(max_new_tokens=25, repetition_penalty=1.5, logprobs=3),
        SamplingParams(max_new_tokens=20, bad_words=("a", "bc"), min_new_tokens=9, stop_token_ids=tuple(range(30))),
        SamplingParams(max_new_tokens=30, stop=("e", "k"), logit_bias={20: 2.0}),
        SamplingParams(**sampled, n=3, seed=8, logprobs=0),
        SamplingParams(max_new_tokens=12, allowed_token_ids=(7, 9, 11, 40)),
        SamplingParams(max_new_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-z]{4,9}( [0-9]+)*")),
        SamplingParams(max_new_tokens=3, prompt_logprobs=1),
        SamplingParams(max_new_tokens=1),
    ]


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("letters"))


PROMPTS = [
    {"prompt_token_ids": ids} for ids in random_prompts(len(given_params()), min_tokens=2, max_tokens=40, seed=4)
]


def plainly(completions: Sequence[Completion]) -> list[Completion]:
    """Without what depends on the size of a pass in its last bits."""
    return [replace(each, logprobs=None, prompt_logprobs=None) for each in completions]


@pytest.fixture(scope="module")
def wanted(letters: Path) -> list[Completion]:
    with one_thread(), LLM(letters, **SIZES) as llm:
        assert llm._speculation is None, "tokens are not free on a CPU"
        return llm.generate(PROMPTS, given_params())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("every", "options"),
    [
        (1000, {}),
        (4, {}),
        (1, {}),
        (6, {"kv_cache_tier": "host"}),
        (5, {"kv_cache_memory": 14, "max_sequences": 9}),
        (7, {"tokens_per_pass": 20}),
    ],
)
def test_the_text_is_the_same_whatever_is_guessed(
    letters: Path, wanted: list[Completion], every: int, options: dict[str, Any]
) -> None:
    if "kv_cache_memory" in options:  # pages are few: sequences are preempted
        options = {**options, "kv_cache_memory": options["kv_cache_memory"] * 8 * token_bytes(letters)}
    texts = [[*PROMPTS[each.prompt_index]["prompt_token_ids"], *each.token_ids] for each in wanted]
    with one_thread(), LLM(letters, speculate="ngram", **{**SIZES, **options}) as llm:
        assert llm._speculation is not None
        llm._speculation._drafter = Oracle(texts, every)
        found = llm.generate(PROMPTS, given_params())
        assert plainly(found) == plainly(wanted)
        for each, other in zip(found, wanted, strict=True):
            if other.logprobs is not None:
                assert each.logprobs is not None
                assert [one.chosen for one in each.logprobs] == pytest.approx(
                    [one.chosen for one in other.logprobs], abs=1e-4
                )
        stats = llm.stats()
        is_short = "max_sequences" in options
        assert stats.guessed_tokens > (0 if is_short else 50)
        assert (stats.accepted_tokens > (0 if is_short else 20)) == (every > 1)
        if every == 1000:
            assert stats.accepted_tokens > 0.8 * stats.guessed_tokens
            assert stats.passes < 20, "the grammar's output alone is not guessed"
        assert llm._batcher._scheduler.pool.num_used == 0
        deltas = list(llm_deltas(llm))
        for each in wanted:
            own = [delta for delta in deltas if (delta.prompt_index, delta.sample_index) == place_of(each)]
            assert tuple(token for delta in own for token in delta.token_ids) == each.token_ids
            assert "".join(delta.text for delta in own) == each.text


def llm_deltas(llm: LLM) -> list[CompletionDelta]:
    handle = llm.prepare(PROMPTS, given_params(), deltas=True)
    llm.submit(handle)
    return [each for each in handle if isinstance(each, CompletionDelta)]


def place_of(completion: Completion) -> tuple[int, int]:
    return completion.prompt_index, completion.sample_index


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_families(family: str, tmp_path: Path) -> None:
    """With a sliding window and learnt positions; the text repeats itself."""
    folder = tiny_checkpoint(family, tmp_path)
    params = SamplingParams(max_new_tokens=50, allowed_token_ids=(5, 9))
    found = []
    for kind in ("off", "ngram"):
        with LLM(folder, speculate=kind, **SIZES) as llm:
            found.append([each.token_ids for each in llm.generate(PROMPTS[:5], params)])
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats.accepted_tokens > 50
    assert stats.passes < 45


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("seed", "num_layers"), [(0, 2), (1, 1)])
def test_a_small_model_guesses(
    letters: Path, wanted: list[Completion], tmp_path: Path, seed: int, num_layers: int
) -> None:
    """One that is the same as the large model, and one that knows nothing; neither changes the text."""
    draft = letters_model(tmp_path, seed=seed, num_layers=num_layers)
    num_threads = settled_threads()
    with one_thread(), LLM(letters, draft_model=draft, **SIZES) as llm:
        assert plainly(llm.generate(PROMPTS, given_params())) == plainly(wanted)
        stats = llm.stats()
        if seed == 0:  # sampled texts it guesses wrong
            assert stats.accepted_tokens > 60
            assert stats.passes < 30
        else:
            assert stats.guessed_tokens > 10 * stats.accepted_tokens
        assert llm._batcher._scheduler.pool.num_used == 0
    assert settled_threads() == num_threads
    with LLM(letters, draft_model=draft, speculate="off", **SIZES) as llm:
        assert llm._draft is None


def test_a_small_model_that_cannot_help_is_refused_or_does_without(letters: Path, tmp_path: Path) -> None:
    shutil.copytree(letters, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"á":'))
    num_threads = settled_threads()
    with pytest.raises(ConfigError, match=r"zinfer.draft_model = .*other.*: its vocabulary of 131 tokens is not"):
        LLM(letters, draft_model=tmp_path / "other", **SIZES)
    with pytest.raises(CheckpointError, match="none"):
        LLM(letters, draft_model=tmp_path / "none", **SIZES)
    assert settled_threads() == num_threads
    check_vocabulary(tmp_path, (None, 131), (None, 131))
    with pytest.raises(ConfigError, match="give a smaller model of the same family"):
        check_vocabulary(tmp_path, (None, 130), (None, 131))
    asked: list[int] = []

    def generate(prompts: list[dict[str, list[int]]], params: SamplingParams) -> list[Completion]:
        asked.append(params.most_new_tokens)
        found = [Completion.failed(0, 0, "too long"), Completion(1, 0, "", (4, 9, 12, 5), "length", None, None)]
        return found[: len(prompts)]

    drafter = DraftModel(generate, vocab_size=10)
    assert drafter.guess([TokenSequence(0, [1], 9), TokenSequence(1, [2], 9)], 31) == {1: (4, 9)}
    assert drafter.guess([], 31) == {}
    assert asked == [8]


Served = tuple[list[Any], list[tuple[int, ...]], int]


def served(rank: int, folder: Path) -> list[Served]:
    """The passes, the texts, and how many guesses were right, by what guesses."""
    found = []
    options: list[dict[str, Any]] = [{"speculate": "ngram"}, {"draft_model": folder}]
    for each in options:
        with in_lockstep(folder, 2, **each) as (llm, passes):
            few = (5, 9, 20) if "speculate" in each else None  # so that the text repeats itself
            params = [
                SamplingParams(max_new_tokens=30 + at, allowed_token_ids=few, temperature=at % 2, seed=at)
                for at in range(6)
            ]
            completions = llm.generate(PROMPTS[:6], params)
            found.append((passes, [one.token_ids for one in completions], llm.stats().accepted_tokens))
    return found


@pytest.mark.slow
def test_ranks_verify_the_first_ones_guesses(letters: Path) -> None:
    first, second = run_ranks(2, served, letters)
    assert [each[:2] for each in first] == [each[:2] for each in second]
    assert all(accepted > 20 for _, _, accepted in first)


def test_tokens_behind_wrong_guesses_do_not_count() -> None:
    sequences = [TokenSequence(number, [1], 9) for number in range(4)]
    rows: list[Any] = [SimpleNamespace(sequence=each) for each in sequences]
    guesses = [(3, 4), (), (3, 4, 5), (6,)]
    tokens = [3, 4, 8, 7, 3, 9, 5, 5, 6, BROKEN]
    found = rounds(sequences, rows, guesses, Sampled(tokens, [None] * 10, (9,)), {0, 1, 2, 3})
    assert [([each.number for each in one.sequences], one.token_ids) for one in found] == [
        ([0, 1, 2, 3], [3, 7, 3, 6]),
        ([0, 2], [4, 9]),
        ([0], [8]),
    ]
    running = {0, 2}
    ended = rounds(sequences, rows, guesses, Sampled(tokens, [None] * 10, (9,)), running)
    next(ended)
    running.remove(0)
    assert [each.number for each in next(ended).sequences] == [2]


def test_few_sequences_have_guesses() -> None:
    speculation = Speculation(NGramDrafter())
    assert [speculation.most_guesses(number) for number in (1, 8, 64, 128, 129)] == [31, 31, 3, 1, 0]


@pytest.mark.parametrize(
    ("kind", "device", "streamed_bytes", "free_tokens", "is_on"),
    [
        ("auto", "cuda", 10**9, MOST_TOKENS, True),
        ("auto", "cuda", 10**9, MOST_TOKENS - 1, False),
        ("auto", "cuda", 0, 0, False),
        ("auto", "cpu", 10**9, 10**4, False),
        ("off", "cuda", 10**9, 10**4, False),
        ("ngram", "cpu", 0, 0, True),
    ],
)
def test_guesses_are_made_where_they_cost_nothing(
    kind: str, device: str, streamed_bytes: int, free_tokens: int, is_on: bool
) -> None:
    model = SimpleNamespace(device=SimpleNamespace(type=device), plan=SimpleNamespace(streamed_bytes=streamed_bytes))
    found: Any = open_speculation(
        resolve_settings({"zinfer": {"speculate": kind}}),
        cast(Any, model),
        SimpleNamespace(free_tokens=lambda: free_tokens),
        None,
    )
    assert (found is not None) == is_on
