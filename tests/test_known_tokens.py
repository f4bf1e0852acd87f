"""Calls of which an earlier process completed a part: the rest gets the bits that it had, in fewer passes."""

import random
from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs_support import letters_model
from llm_support import token_bytes
from ranks_support import run_ranks

from zinfer import LLM, Completion, SamplingParams, StructuredOutputsParams
from zinfer.batching.known_tokens import EVERYTHING, PromptTree
from zinfer.errors import ConfigError
from zinfer.scheduling.schedule import PassSize

PAGE = 8
NUM_ROWS = 60
Known = Mapping[int, Sequence[Sequence[int]]]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(lambda ids: array("i", ids))


@given(prompts=st.lists(TOKENS, max_size=5), text=TOKENS, page_size=st.integers(1, 4))
def test_what_a_text_shares_with_prompts_is_counted_in_pages(
    prompts: list["array[int]"], text: "array[int]", page_size: int
) -> None:
    tree = PromptTree(page_size)
    for each in prompts:
        tree.add(each)
    num_equal = 0
    for each in prompts:
        pairs = enumerate(zip(each, text, strict=False))
        equal = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(each), len(text)))
        num_equal = max(num_equal, EVERYTHING if equal == len(each) else equal // page_size * page_size)
    assert tree.num_shared(text) == num_equal


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters")


def rows() -> list[tuple[str, SamplingParams]]:
    """Prompts, half of them with a beginning in common, and params of all kinds."""
    drawn = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        {"temperature": 1.0, "seed": 4, "n": 2, "logprobs": 3},
        {"stop": ["a", "e"], "logprobs": 0},
        {"structured_outputs": StructuredOutputsParams(regex="[a-d]{2,9}")},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 1.2, "ignore_eos": True},
    ]
    found = []
    for number in range(NUM_ROWS):
        text = "".join(drawn.choices("abcdefgh", k=drawn.randint(1, 30)))
        prompt = f"{'ab' * 12}{text}" if number % 2 else text
        params = SamplingParams(max_new_tokens=drawn.randint(1, 25), **kinds[number % len(kinds)])
        found.append((prompt, params))
    return [*found, *found[:9]]


def called(llm: LLM, known: Known) -> tuple[list[Completion], list[PassSize], int]:
    """The completions in order, the sizes of the passes that were computed, and the number of tokens drawn.

    Other keys and values than those of the call before are in all pages when it begins, as in a new process.
    """
    others = [[3 + number % 7] * PAGE * 4 for number in range(llm.batching.num_pages // 4)]
    llm.generate([{"prompt_token_ids": each} for each in others], SamplingParams(max_new_tokens=2))
    llm.reset_prefix_cache()
    prompts, params = zip(*rows(), strict=True)
    before = llm.num_new_tokens
    with closing(llm.stream(list(prompts), list(params), known=known)) as stream:
        found = sorted(stream, key=lambda each: (each.prompt_index, each.sample_index))
    return found, list(llm._batcher.pass_sizes), llm.num_new_tokens - before


def known_of(whole: Sequence[Completion], numbers: Sequence[int]) -> Known:
    return {number: [each.token_ids for each in whole if each.prompt_index == number] for number in numbers}


def left_of(sizes: list[PassSize], fewer: list[PassSize]) -> list[PassSize] | None:
    """The sizes without the others, which are some of them in this order; None if they are not."""
    left, coming = [], iter(fewer)
    following = next(coming, None)
    for size in sizes:
        if size == following:
            following = next(coming, None)
        else:
            left.append(size)
    return left if following is None else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_pages", "options"),
    [
        (400, {"tokens_per_pass": 48}),
        (30, {"tokens_per_pass": 24}),
        (30, {"speculate": "ngram"}),
        (24, {"max_sequences": 3, "kv_cache_tier": "host"}),
    ],
    ids=["roomy", "preempting", "guessing", "hosted"],
)
def test_the_rest_of_a_call_has_its_bits_and_passes(letters: Path, num_pages: int, options: dict[str, Any]) -> None:
    memory = num_pages * PAGE * token_bytes(letters)
    drawn = random.Random(2)
    with LLM(letters, device="cpu", kv_page_size=PAGE, kv_cache_memory=memory, **options) as llm:
        whole, sizes, num_drawn = called(llm, {})
        again, same, _ = called(llm, {})
        assert (again, same) == (whole, sizes), "without known tokens it is not the same call"
        assert not [each.error for each in whole if each.error]
        ended = [each.prompt_index for each in whole]  # in their order; a call is cut short after some of them
        late = NUM_ROWS - 1  # begins with pages that were computed long before
        all_but_late = [number for number in range(len(rows())) if number != late]
        for numbers in (ended[: NUM_ROWS // 2], drawn.sample(range(NUM_ROWS), 50), all_but_late, [3]):
            known = known_of(whole, numbers)
            found, computed, num_more = called(llm, known)
            missing = [each for each in whole if each.prompt_index not in known]
            assert [each for each in found if each.prompt_index not in known] == missing
            assert left_of(sizes, computed) is not None, "other passes than those of the whole call"
            assert num_more == sum(len(each.token_ids) for each in missing) or options.get("speculate")
            assert [each.token_ids for each in found] == [each.token_ids for each in whole], "known ones are followed"
        everything = known_of(whole, range(len(rows())))
        found, computed, num_more = called(llm, everything)
        assert (computed, num_more) == ([], 0)
    assert num_drawn


def cut_short(rank: int, folder: Path, parallel: dict[str, int]) -> tuple[list[bool], int, int]:
    """Whether each missing completion is what it was, and the passes of the whole call and of the rest."""
    memory = 60 * PAGE * token_bytes(folder)
    options: dict[str, Any] = {"kv_page_size": PAGE, "kv_cache_memory": memory, "max_sequences": 6}
    with LLM(folder, {"zinfer": {"parallel": parallel}}, device="cpu", **options) as llm:
        whole, sizes, _ = called(llm, {})
        known = known_of(whole, [each.prompt_index for each in whole if each.prompt_index < NUM_ROWS - 5])
        found, computed, _ = called(llm, known)
    pairs = zip(whole, found, strict=True)
    return [one == other for one, other in pairs if one.prompt_index not in known], len(sizes), len(computed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("pipeline", marks=pytest.mark.slow), "tensor"])
def test_ranks_that_make_the_same_passes_leave_out_the_same(letters: Path, mode: str) -> None:
    leader, follower = run_ranks(2, cut_short, letters, {mode: 2})
    assert leader[0]
    assert all((*leader[0], *follower[0]))
    _, num_passes, num_computed = leader  # a follower may make passes ahead of its own calls
    assert num_computed < num_passes / 2


def test_tokens_that_cannot_be_known_are_refused(letters: Path) -> None:
    with LLM(letters, device="cpu") as llm:
        for known, told in (
            ({1: [(3,), (4,)]}, r"known\[1\] has 2 completions, and the prompt gets 1"),
            ({0: [(3, 131)]}, r"known\[0\] has a token that the model has not; ids go from 0 to 130"),
            ({0: [(-1,)]}, "has a token that the model has not"),
        ):
            with pytest.raises(ConfigError, match=told):
                list(llm.stream(["abc", "b"], known=known))


def test_calls_beside_one_with_known_tokens_are_refused(letters: Path) -> None:
    with LLM(letters, device="cpu") as llm:
        long = llm.prepare("abc", SamplingParams(max_new_tokens=100, ignore_eos=True))
        llm.submit(long)
        with pytest.raises(RuntimeError, match="a call with known tokens shares its passes with no other"):
            list(llm.stream(["abc", "b"], known={0: [(3, 4)]}))
        assert len(list(long)) == 1
        known = llm.generate(["abc", "b"], SamplingParams(max_new_tokens=5))
        again = list(llm.stream(["abc", "b"], SamplingParams(max_new_tokens=5), known={0: [known[0].token_ids]}))
        assert sorted(again, key=lambda each: each.prompt_index) == known
