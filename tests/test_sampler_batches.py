"""Batches: a row's result is its own whatever stands beside it, broken rows cost only themselves, work is shared."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from zinfer.requests.logprobs import Logprobs
from zinfer.requests.sampling_params import SamplingParams
from zinfer.sampling.sampler import Row, Sampler, row_uniform

PADDING = 3


def some_row(numbers: random.Random, vocab_size: int) -> Row:
    """A row that asks for anything; half of the rows ask for little."""

    def maybe(value: Any, default: Any) -> Any:
        return value if numbers.random() < 0.5 else default

    output = [numbers.randrange(vocab_size) for _ in range(numbers.randrange(6))]
    params = SamplingParams(
        temperature=maybe(numbers.uniform(0.2, 2), 0.0),
        top_k=maybe(numbers.randrange(1, vocab_size + 3), 0),
        top_p=maybe(numbers.uniform(0.1, 1), 1.0),
        min_p=maybe(numbers.uniform(0, 0.2), 0.0),
        repetition_penalty=maybe(numbers.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(numbers.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(numbers.uniform(-2, 2), 0.0),
        logit_bias=maybe({numbers.randrange(vocab_size + 4): numbers.uniform(-5, 5) for _ in range(3)}, None),
        allowed_token_ids=maybe(tuple(numbers.randrange(vocab_size) for _ in range(9)), None),
        min_new_tokens=maybe(4, 0),
        stop_token_ids=maybe((numbers.randrange(vocab_size),), ()),
        logprobs=maybe(numbers.randrange(5), None),
    )
    prompt = [numbers.randrange(-1, vocab_size + 4) for _ in range(numbers.randrange(9))]
    bad_word_ids = maybe(((numbers.randrange(vocab_size),), (*output[-2:], numbers.randrange(vocab_size))), ())
    params = replace(params, bad_words=("bad",) if bad_word_ids else ())
    uniform_at = partial(row_uniform, numbers.getrandbits(64))
    return Row(params, prompt, output, (0, vocab_size + 1), uniform_at, bad_word_ids)


def some_batch(seed: int, num_rows: int, vocab_size: int) -> tuple[torch.Tensor, list[Row]]:
    """Logits of few levels, so that there are ties, padded with what would win every time."""
    numbers = random.Random(seed)
    logits = torch.randn(num_rows, vocab_size + PADDING, generator=torch.Generator().manual_seed(seed)) * 4
    logits = (logits * 8).round() / 8
    logits[:, vocab_size:] = torch.tensor([torch.nan, torch.inf, 1000.0])
    return logits, [some_row(numbers, vocab_size) for _ in range(num_rows)]


Result = tuple[int, Logprobs | None]


def results(sampler: Sampler, logits: torch.Tensor, rows: list[Row]) -> list[Result]:
    sampled = sampler.sample(logits, rows)
    assert sampled.broken == tuple(i for i, token_id in enumerate(sampled.token_ids) if token_id == -1)
    return list(zip(sampled.token_ids, sampled.logprobs, strict=True))


def assert_rows_are_their_own(logits: torch.Tensor, rows: list[Row], vocab_size: int) -> None:
    sampler = Sampler(vocab_size, logits.device)
    together = results(sampler, logits, rows)
    alone = [results(sampler, logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    assert together == alone
    order = list(range(len(rows)))
    random.Random(len(rows)).shuffle(order)
    assert results(sampler, logits[order], [rows[i] for i in order]) == [together[i] for i in order]


@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 12), vocab_size=st.integers(5, 140))
def test_a_row_in_a_batch_is_bit_for_bit_as_alone(seed: int, num_rows: int, vocab_size: int) -> None:
    logits, rows = some_batch(seed, num_rows, vocab_size)
    assert_rows_are_their_own(logits, rows, vocab_size)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1001, 32_003])
def test_wide_rows_are_their_own_too(vocab_size: int, dtype: torch.dtype, device: str) -> None:
    logits, rows = some_batch(5, 24, vocab_size)
    logits = logits.to(device, dtype)
    assert_rows_are_their_own(logits, rows, vocab_size)


def test_padding_is_never_read(device: str) -> None:
    logits, rows = some_batch(4, 20, 60)
    logits = logits.to(device)
    padded = results(Sampler(60, device), logits, rows)
    assert padded == results(Sampler(60, device), logits[:, :60].clone(), rows)
    assert all(0 <= token_id < 60 for token_id, _ in padded)


def test_parts_do_not_show() -> None:
    logits, rows = some_batch(3, 31, 50)
    whole = results(Sampler(50, "cpu"), logits, rows)
    for most in (1, 50 * 4, 50 * 30):
        assert results(Sampler(50, "cpu", most), logits, rows) == whole


def test_logits_are_not_changed() -> None:
    logits, rows = some_batch(8, 20, 40)
    before = logits.clone()
    Sampler(40, "cpu").sample(logits, rows)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, logprobs=2)])
@pytest.mark.parametrize("place", [0, 17, 29])
def test_a_broken_row_costs_only_itself(kind: SamplingParams, place: int, device: str) -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(2)).to(device)
    rows = [Row(kind, [1], [], (), lambda step: 0.5)] * 6
    sampler = Sampler(30, device)
    healthy = results(sampler, logits, rows)
    logits[1, place] = torch.nan
    logits[3, place] = torch.inf
    logits[4] = -torch.inf
    logits[5, place] = -torch.inf  # a token that may not come breaks nothing
    found = results(sampler, logits, rows)
    assert [found[i] for i in (1, 3, 4)] == [(-1, None)] * 3
    assert [found[i] for i in (0, 2)] == [healthy[i] for i in (0, 2)]
    assert found[5][0] not in (-1, place)


def test_what_is_forbidden_or_biased_cannot_hide_a_broken_logit(device: str) -> None:
    logits = torch.zeros(3, 10, device=device)
    logits[0, 4] = torch.nan
    logits[1, 4] = torch.inf
    too_short = SamplingParams(min_new_tokens=2, stop_token_ids=(4,), temperature=1.0)
    assert Sampler(10, device).sample(logits, [Row(too_short, [], [], (), lambda step: 0.3)] * 3).broken == (0, 1)
    everything = SamplingParams(min_new_tokens=2, stop_token_ids=tuple(range(10)))
    sampled = Sampler(10, device).sample(logits, [Row(everything, [], [], (), lambda step: 0.3)] * 3)
    assert sampled.broken == (0, 1, 2)
    assert sampled.token_ids == [-1, -1, -1]


def test_end_tokens_come_only_after_the_least_number_of_tokens(device: str) -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]], device=device)
    params = SamplingParams(min_new_tokens=2, stop_token_ids=(2,), ignore_eos=True)
    tokens = [
        Sampler(4, device).sample(logits, [Row(params, [1], [3] * done, (1,), lambda step: 0.0)]).token_ids[0]
        for done in range(3)
    ]
    assert tokens == [3, 3, 1]


def test_an_empty_batch() -> None:
    sampled = Sampler(4, "cpu").sample(torch.empty(0, 4), [])
    assert (sampled.token_ids, sampled.logprobs, sampled.broken) == ([], [], ())


class Operations(TorchDispatchMode):
    """Counts the operations that touch data, and of them those that read at least `wide` numbers."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self._wide = wide
        self.names: Counter[str] = Counter()
        self.wide_names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names[str(func)] += 1
            if any(isinstance(arg, torch.Tensor) and arg.numel() >= self._wide for arg in args):
                self.wide_names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def host_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements of every `tolist`, which is how results come to the host."""
    sizes: list[int] = []
    original = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        sizes.append(tensor.numel())
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    return sizes


def test_plain_greedy_is_one_reduction_and_one_copy(host_copies: list[int]) -> None:
    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    expected = logits.argmax(1)
    rows = [Row(SamplingParams(), [1], [2], (3,), lambda step: 0.0)] * 50
    with Operations(wide=50 * 64) as seen:
        sampled = Sampler(64, "cpu", 100).sample(logits, rows)  # parts are for rows that need memory
    assert seen.wide_names == {"aten.max.dim": 1}
    assert host_copies == [50]
    assert sampled.token_ids == expected.tolist()
    assert "aten._local_scalar_dense.default" not in seen.names


def test_the_number_of_operations_does_not_grow_with_the_rows(host_copies: list[int]) -> None:
    asked = [
        SamplingParams(),
        SamplingParams(temperature=1.0, logprobs=2),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.5),
        SamplingParams(repetition_penalty=1.2, logit_bias={1: 1.0}, min_new_tokens=4),
        SamplingParams(allowed_token_ids=(1, 2)),
    ]
    seen: list[tuple[Counter[str], int]] = []
    for times in (1, 9):
        host_copies.clear()
        rows = [Row(params, [1, 2], [3], (4,), lambda step: 0.4) for params in asked * times]
        logits = torch.randn(len(rows), 64, generator=torch.Generator().manual_seed(0))
        with Operations(wide=1) as operations:
            Sampler(64, "cpu").sample(logits, rows)
        seen.append((operations.names, len(host_copies)))
    assert seen[0] == seen[1]
