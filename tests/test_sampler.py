"""One row's token: against transformers' processors and warpers, the batch job's own draw, and plain Python."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import Sampling
from sampling_reference import draw as draw_alone
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from zinfer.requests.sampling_params import SamplingParams
from zinfer.sampling.sampler import Row, Sampler, row_uniform
from zinfer.sampling.weighed import Weighed

VOCAB = 61
PROMPT = [3, 5, 5, 60, 7]
OUTPUT = [5, 11, 11, 11, 0]


def row(params: SamplingParams, uniform: float = 0.0, output: Sequence[int] = ()) -> Row:
    return Row(params, PROMPT, output, (1,), lambda step: uniform)


def logits_of(seed: int, num_rows: int = 1, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def tokens_at(logits_1V: torch.Tensor, params: SamplingParams, uniforms: list[float], device: str) -> list[int]:
    rows = [row(params, uniform, OUTPUT) for uniform in uniforms]
    logits = logits_1V.expand(len(rows), -1).to(device)
    return Sampler(logits.shape[1], device).sample(logits, rows).token_ids


def assert_draws_from(probabilities_V: torch.Tensor, logits_1V: torch.Tensor, params: SamplingParams, dev: str) -> None:
    """Just inside both ends and in the middle of each token's stretch of quantiles, that token is drawn."""
    ends = probabilities_V.double().cumsum(0).tolist()
    uniforms, expected = [], []
    for token_id, probability in enumerate(probabilities_V.tolist()):
        if probability > 1e-5:
            first, last = ends[token_id] - probability, ends[token_id]
            uniforms += [first + 1e-6, (first + last) / 2, last - 1e-6]
            expected += [token_id] * 3
    assert len(expected) >= 3
    assert tokens_at(logits_1V, params, uniforms, dev) == expected


FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.35),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=0.8, top_k=7),
    SamplingParams(temperature=0.8, top_k=VOCAB + 5),
    SamplingParams(temperature=1.3, top_p=0.7),
    SamplingParams(temperature=1.3, top_p=1e-9),
    SamplingParams(temperature=1.3, min_p=0.08),
    SamplingParams(temperature=1.3, min_p=1.0),
    SamplingParams(temperature=1.7, min_p=0.01, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.7, top_k=20, top_p=0.5),
    SamplingParams(temperature=1.2, repetition_penalty=1.6),
    SamplingParams(temperature=1.2, repetition_penalty=0.6, top_p=0.8),
    SamplingParams(temperature=1.5, min_new_tokens=6, stop_token_ids=(8, 9)),
    SamplingParams(temperature=1.5, min_new_tokens=5, stop_token_ids=(8, 9)),
    SamplingParams(temperature=1.1, min_new_tokens=9, repetition_penalty=1.3, min_p=0.02, top_k=25, top_p=0.95),
]


def by_transformers(params: SamplingParams, logits_1V: torch.Tensor) -> torch.Tensor:
    """What transformers draws from, [vocabulary], in the order of vLLM."""
    ends = [1, *params.stop_token_ids]
    steps = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_new_tokens, ends)])
    steps.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    steps.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    return torch.softmax(steps(torch.tensor([PROMPT + OUTPUT]), logits_1V.double()), dim=-1)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", FILTERS, ids=range(len(FILTERS)))
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_draws_from_what_transformers_leaves(params: SamplingParams, seed: int, device: str) -> None:
    logits_1V = logits_of(seed)
    assert_draws_from(by_transformers(params, logits_1V), logits_1V, params, device)


def penalized(logits: list[float], params: SamplingParams) -> list[float]:
    """Biases, frequency and presence in plain Python, as OpenAI states them."""
    counts = Counter(OUTPUT)
    found = []
    for token_id, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token_id, 0.0)
        logit -= params.frequency_penalty * counts[token_id]
        found.append(logit - (params.presence_penalty if counts[token_id] else 0.0))
    return found


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, frequency_penalty=0.7),
        SamplingParams(temperature=1.0, presence_penalty=-1.5),
        SamplingParams(temperature=1.0, frequency_penalty=-1.1, presence_penalty=2.0),
        SamplingParams(temperature=1.0, frequency_penalty=0.4, logit_bias={5: 3.5, 60: -100, 2: 1}),
    ],
)
def test_biases_and_penalties_of_the_output(params: SamplingParams, device: str) -> None:
    logits_1V = logits_of(4)
    expected = torch.tensor(penalized(logits_1V[0].tolist(), params), dtype=torch.float64).softmax(0)
    assert_draws_from(expected, logits_1V, params, device)
    greedy = replace(params, temperature=0.0)
    assert tokens_at(logits_1V, greedy, [0.0], device) == [int(expected.argmax())]


def test_token_ids_beyond_the_vocabulary_change_nothing(device: str) -> None:
    params = SamplingParams(repetition_penalty=3.0, presence_penalty=2.0, logit_bias={9: 50.0}, min_new_tokens=9)
    logits = torch.tensor([[1.0, 0.9, 0.5, 0.9], [0.9, 0.5, 0.9, 1.0]], device=device)
    beyond = Row(params, [4, 9, -1], [4, 5, -7], (4, 8, -1), lambda step: 0.0)
    assert Sampler(4, device).sample(logits, [beyond] * 2).token_ids == [0, 3]


def test_bias_comes_before_the_repetition_penalty() -> None:
    logits = torch.tensor([[-1.0, 0.75, 0.0, 4.0]])
    params = SamplingParams(logit_bias={3: -2.0}, repetition_penalty=2.0)
    # (4 - 2) / 2 is more than 0.75, and 4 / 2 - 2 is less.
    assert Sampler(4, "cpu").sample(logits, [Row(params, [3], [], (), lambda step: 0.0)]).token_ids == [3]


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(1, 90),
    top_k=st.integers(0, 95),
    has_top_p=st.booleans(),
    levels=st.sampled_from([2, 5, 1000]),
)
def test_draws_the_tokens_of_the_row_by_row_draw(
    seed: int, vocab_size: int, top_k: int, has_top_p: bool, levels: int
) -> None:
    logits_1V = (logits_of(seed, vocab_size=vocab_size) * levels).round() / levels  # few levels: many ties
    top_p = row_uniform(seed, 1000) if has_top_p else 1.0
    params = SamplingParams(temperature=0.1 + 2 * row_uniform(seed, 1001), top_k=top_k, top_p=top_p)
    uniforms = [row_uniform(seed, step) for step in range(25)]
    alone = Sampling(params.temperature, top_k, top_p)
    assert tokens_at(logits_1V, params, uniforms, "cpu") == [draw_alone(logits_1V[0], alone, u) for u in uniforms]


def test_greedy_takes_the_lowest_of_equals(device: str) -> None:
    logits = torch.zeros(3, 700, dtype=torch.bfloat16, device=device)
    logits[1, 400:] = 2.0
    logits[2, [650, 13, 699]] = 2.0
    params = SamplingParams()
    assert Sampler(700, device).sample(logits, [row(params)] * 3).token_ids == [0, 400, 13]


def test_ties_at_top_k_stay_and_at_top_p_the_lower_ids_stay(device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 2.0, -1.0]])
    steps = [i / 40 for i in range(40)]
    assert set(tokens_at(logits, SamplingParams(temperature=1.0, top_k=2), steps, device)) == {1, 2, 3, 4}
    assert set(tokens_at(logits, SamplingParams(temperature=1.0, top_p=0.4), steps, device)) == {1, 2}
    alike = torch.zeros(1, 4)
    assert set(tokens_at(alike, SamplingParams(temperature=1.0, top_p=0.5), steps, device)) == {0, 1}


def test_extreme_temperatures_overflow_nothing(device: str) -> None:
    logits = torch.tensor([[1e30, 3e38, -3e38, 2.9e38]])
    cold, hot = SamplingParams(temperature=1e-300), SamplingParams(temperature=1e300)
    assert tokens_at(logits, cold, [0.0, 0.5, 1 - 2**-53], device) == [1, 1, 1]
    assert tokens_at(logits, hot, [0.1, 0.3, 0.6, 1 - 2**-53], device) == [0, 1, 2, 3]


def test_the_first_and_last_quantile_fall_on_tokens_that_can_be(device: str) -> None:
    logits = torch.full((1, 40), -torch.inf)
    logits[0, 7:30] = logits_of(9, vocab_size=23)
    assert tokens_at(logits, SamplingParams(temperature=1.0), [0.0, 1 - 2**-53], device) == [7, 29]


@given(seed=st.integers(0, 2**32), vocab_size=st.integers(1, 300), spread=st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_no_quantile_lies_beyond_the_last_token(seed: int, vocab_size: int, spread: float) -> None:
    logits_1V = logits_of(seed, vocab_size=vocab_size) * spread
    params = SamplingParams(temperature=1.0, top_k=1 + seed % 300)
    assert 0 <= tokens_at(logits_1V, params, [1 - 2**-53], "cpu")[0] < vocab_size


def test_many_draws_have_the_frequencies_of_the_distribution() -> None:
    num_draws = 40_000
    logits_1V = logits_of(6, vocab_size=12) / 3
    uniforms = [row_uniform(17, step) for step in range(num_draws)]
    found = Counter(tokens_at(logits_1V, SamplingParams(temperature=1.0), uniforms, "cpu"))
    expected = (logits_1V[0].double().softmax(0) * num_draws).tolist()
    chi_square = sum((found[i] - expected[i]) ** 2 / expected[i] for i in range(12))
    # Fixed streams, so this cannot change from run to run; 11 degrees of freedom pass 31.3 once in a thousand.
    assert chi_square < 31.3


def test_streams_are_uniform_and_differ_by_seed_and_step() -> None:
    values = [row_uniform(seed, step) for seed in (0, 1, 2**64 - 1) for step in range(2000)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 and value * 2**53 == int(value * 2**53) for value in values)
    tenths = Counter(int(value * 10) for value in values)
    assert all(abs(tenths[i] - 600) < 110 for i in range(10))  # 4.7 standard deviations
    assert row_uniform(1, 0) != row_uniform(0, 1)
    assert row_uniform(7, 3) == 0.9986242008567702  # a job that goes on tomorrow draws what it would have drawn today


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_are_those_of_the_raw_logits(temperature: float, device: str) -> None:
    logits = logits_of(11)
    params = SamplingParams(temperature=temperature, logprobs=4, logit_bias={20: 90.0}, repetition_penalty=1.5, top_k=3)
    sampled = Sampler(VOCAB, device).sample(logits.to(device), [row(params)])
    expected = logits[0].double().log_softmax(0)
    found = sampled.logprobs[0]
    assert found is not None
    assert sampled.token_ids == [20]
    assert found.chosen == pytest.approx(float(expected[20]), abs=1e-6)
    assert found.top_ids == expected.topk(4).indices.tolist()
    assert found.top == pytest.approx(expected.topk(4).values.tolist(), abs=1e-6)


def test_only_rows_that_ask_get_logprobs() -> None:
    params = [SamplingParams(), SamplingParams(logprobs=0), SamplingParams(logprobs=2), SamplingParams(logprobs=99)]
    logits = logits_of(12, 4)
    sampled = Sampler(VOCAB, "cpu").sample(logits, [row(each) for each in params])
    assert sampled.logprobs[0] is None
    lengths = [(len(each.top_ids), len(each.top)) for each in sampled.logprobs[1:] if each is not None]
    assert lengths == [(0, 0), (2, 2), (VOCAB, VOCAB)]
    assert sampled.logprobs[1] is not None
    assert sampled.logprobs[1].chosen == pytest.approx(float(logits[1].double().log_softmax(0).max()), abs=1e-9)
    assert sampled.logprobs[3] is not None
    assert math.fsum(map(math.exp, sampled.logprobs[3].top)) == pytest.approx(1, abs=1e-9)


def test_equal_logits_are_told_in_the_order_of_their_ids(device: str) -> None:
    logits = torch.zeros(1, 300, device=device)
    sampled = Sampler(300, device).sample(logits, [row(SamplingParams(logprobs=5))])
    assert sampled.logprobs[0] is not None
    assert sampled.logprobs[0].top_ids == [0, 1, 2, 3, 4]
    assert sampled.logprobs[0].top == pytest.approx([-math.log(300)] * 5)


@pytest.mark.parametrize("num_top", [1, 7, 300])
def test_of_equally_likely_tokens_the_lower_ids_come_first(num_top: int, device: str) -> None:
    logits = torch.randint(-3, 4, (9, 300), generator=torch.Generator().manual_seed(2)).float() / 8
    logits[0, 5], logits[1], logits[1, 9], logits[2, 7] = -0.0, -torch.inf, 1.0, 3e38
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    weighed = Weighed.of(logits.to(device), torch.zeros(9, dtype=torch.int64, device=device), [num_top] * 9)
    found = list(weighed.logprobs(each.cpu() for each in weighed.tensors))
    assert [None if each is None else each.top_ids for each in found] == ids[:, :num_top].tolist()
    peaks = [each.top[0] - float(row[0]) for each, row in zip(found, ordered, strict=True) if each is not None]
    for each, row, below in zip(found, ordered, peaks, strict=True):
        assert each is not None
        assert each.top == pytest.approx([value + below for value in row[:num_top].tolist()])
