"""What rows may ask of their sampling: what is taken, and in which words the rest is refused."""

import json
import math
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from zinfer.errors import ConfigError
from zinfer.requests.prompt_encoder import PromptEncoder
from zinfer.requests.sampling_params import SamplingParams

_TOKEN_IDS = "a list of token ids, whole numbers of at least 0"
_BIASES = "logit_bias must be an object of token ids, whole numbers of at least 0, and biases from -100 to 100"


def test_the_default_is_greedy_and_changes_nothing() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert (params.top_p, params.repetition_penalty, params.most_new_tokens) == (1.0, 1.0, 128)
    assert params.stop == params.stop_token_ids == ()
    assert params.logit_bias is params.logprobs is params.seed is None
    assert not SamplingParams(temperature=1e-9).is_greedy


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "below", "above"),
    [
        ("max_new_tokens", 1, 10**9, 0, 1.5),
        ("temperature", 0, 1e6, -1e-9, math.inf),
        ("top_k", -1, 10**9, -2, 3.5),
        ("top_p", 1e-300, 1, 0.0, 1.0000001),
        ("min_p", 0, 1, -0.1, 1.1),
        ("repetition_penalty", 1e-3, 1e3, 1e-38, 1001),
        ("repetition_penalty", 1e-3, 1e3, 0, 10**400),
        ("presence_penalty", -2, 2, -2.01, 2.01),
        ("frequency_penalty", -2, 2, -2.01, 2.01),
        ("logprobs", 0, 10**6, -1, 0.5),
        ("seed", -(2**63), 2**64 - 1, -(2**63) - 1, 2**64),
    ],
)
def test_ranges(name: str, lowest: float, highest: float, below: float, above: float) -> None:
    for value in (lowest, highest):
        assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]
    for wrong in (below, above, math.nan, True, "1", [1]):
        with pytest.raises(ConfigError, match=f"^{name} must be .*, not "):
            SamplingParams(**{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    sorted(
        {field.name for field in fields(SamplingParams)}
        - {"max_new_tokens", "logprobs", "prompt_logprobs", "seed", "allowed_token_ids", "structured_outputs"}
        - {"add_special_tokens", "add_generation_prompt", "continue_final_message"}
    ),
)
def test_only_what_may_be_absent_may_be_none(name: str) -> None:
    if name == "logit_bias":
        assert SamplingParams(logit_bias=None).logit_bias is None
        return
    with pytest.raises(ConfigError, match=f"^{name} must be .*, not None$"):
        SamplingParams(**{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"temperature": -1}, "temperature must be a finite number of at least 0 (0: greedy), not -1"),
        ({"top_p": 0}, "top_p must be a number above 0, up to 1 (1: off), not 0"),
        ({"n": 0, "temperature": 1}, "n must be a whole number from 1 to 1024, not 0"),
        ({"n": 2}, "n must be 1 if temperature is 0, since greedy outputs are all the same, not 2"),
        (
            {"max_new_tokens": 4, "min_new_tokens": 5},
            "min_new_tokens must be at most max_new_tokens, which is 4, not 5",
        ),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be true or false, not 1"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens must be true or false, not 'no'"),
        ({"stop": ["a", ""]}, "stop must be a text or a list of texts, none of them empty, not '' at 1"),
        ({"stop": ""}, "stop must be a text or a list of texts, none of them empty, not '' at 0"),
        ({"stop": 3}, "stop must be a text or a list of texts, none of them empty, not 3"),
        ({"stop_token_ids": 7}, f"stop_token_ids must be {_TOKEN_IDS}, not 7"),
        (
            {"stop_token_ids": [-1]},
            f"stop_token_ids must be {_TOKEN_IDS}, not -1 at 0",
        ),
        (
            {"allowed_token_ids": [True]},
            f"allowed_token_ids must be {_TOKEN_IDS}, one at least, not True at 0",
        ),
        (
            {"allowed_token_ids": []},
            f"allowed_token_ids must be {_TOKEN_IDS}, one at least, not []",
        ),
        ({"bad_words": [""]}, "bad_words must be a text or a list of texts, none of them empty, not '' at 0"),
        ({"logit_bias": {"7": 101}}, f"{_BIASES}, not 101 at 7"),
        ({"logit_bias": {"7": None}}, f"{_BIASES}, not None at 7"),
        ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias names a token twice; give each token id once"),
        (
            {"logit_bias": {"x": 1}},
            f"{_BIASES}, not 'x' as a key",
        ),
        ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"max_token": 1}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
        (
            {"max_tokens": 3, "max_new_tokens": 4},
            "max_tokens and max_new_tokens mean the same, but are 3 and 4; give one of them",
        ),
    ],
)
def test_mistakes_are_named_with_what_is_allowed(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams.from_mapping(mapping)
    assert str(caught.value) == message


def test_an_unlike_field_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^unknown field 'zzzz'; known fields: max_new_tokens, .*, min_tokens$"):
        SamplingParams.from_mapping({"zzzz": None})


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(stop_token_ids=("x" * 1000,))  # type: ignore[arg-type]
    assert str(caught.value).endswith("... at 0")
    assert len(str(caught.value)) < 160


def test_a_row_of_json_becomes_params() -> None:
    row = json.loads(
        '{"max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": -1, "top_p": null, "stop": "x",'
        ' "stop_token_ids": [3, 4], "logit_bias": {"5": -100, "6": 1.5}, "logprobs": 0, "seed": 8, "n": 2}'
    )
    assert SamplingParams.from_mapping(row) == SamplingParams(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0.5,
        top_k=-1,
        stop=("x",),
        stop_token_ids=(3, 4),
        logit_bias={5: -100, 6: 1.5},
        logprobs=0,
        seed=8,
        n=2,
    )
    assert SamplingParams.from_mapping({}) == SamplingParams()


def test_two_spellings_may_agree() -> None:
    assert SamplingParams.from_mapping({"max_tokens": 3, "max_new_tokens": 3, "min_tokens": None}).max_new_tokens == 3


def test_the_names_of_vllm_are_names_here() -> None:
    params = SamplingParams(**{"max_tokens": 3, "min_tokens": 2})  # type: ignore[arg-type]
    assert params == SamplingParams(max_new_tokens=3, min_new_tokens=2)
    assert (params.max_tokens, params.min_tokens) == (3, 2)  # type: ignore[attr-defined]
    assert replace(params, max_new_tokens=5).max_new_tokens == 5
    with pytest.raises(ConfigError, match="max_tokens and max_new_tokens mean the same, but are 3 and 4"):
        SamplingParams(**{"max_tokens": 3, "max_new_tokens": 4})  # type: ignore[arg-type]


def test_without_a_number_there_are_as_many_new_tokens_as_fit() -> None:
    params = SamplingParams(min_new_tokens=4)
    assert [params.within(left).max_new_tokens for left in (None, 1000, 9, 3, 0, -2)] == [128, 128, 9, 128, 128, 128]
    assert SamplingParams(max_new_tokens=20).within(9).max_new_tokens == 20


@pytest.mark.parametrize(
    ("most", "num_left", "wanted"),
    [
        (20, 9, (9, 4)),
        (20, 3, (3, 3)),
        (20, 20, (20, 4)),
        (20, None, (20, 4)),
        (20, 0, (20, 4)),  # refused then
        (None, 9, (9, 4)),
        (None, 3, (3, 3)),
        (None, None, (128, 4)),
    ],
)
def test_new_tokens_are_clipped(most: int | None, num_left: int | None, wanted: tuple[int, int]) -> None:
    params = SamplingParams(max_new_tokens=most, min_new_tokens=4).clipped(num_left)
    assert (params.max_new_tokens, params.min_new_tokens) == wanted


def test_params_do_not_follow_the_callers_containers() -> None:
    biases, stops = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=biases, stop=stops)  # type: ignore[arg-type]
    biases[2] = 3.0
    stops.append("b")
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("a",)


def test_params_travel_and_are_keys() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, stop="x", temperature=1.0)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(params)) == params
    assert {params: 1}[replace(params)] == 1


def test_token_ids_are_held_against_the_vocabulary() -> None:
    params = SamplingParams(stop_token_ids=(9,), logit_bias={4: 1.0, 12: 1.0})
    params.check_vocabulary(13)
    with pytest.raises(ConfigError, match=r"^logit_bias must be made of token ids below 12, .*, not 12$"):
        params.check_vocabulary(12)
    with pytest.raises(ConfigError, match=r"^stop_token_ids must be made of token ids below 9, .*, not 9$"):
        params.check_vocabulary(9)


def test_whole_numbers_of_other_types_are_whole_numbers() -> None:
    """numpy's, and those that JSON's writers make of columns of floats."""
    found = SamplingParams(
        max_tokens=8.0,
        top_k=np.int64(5),
        stop_token_ids=[np.int32(3)],
        logit_bias={np.int64(4): 1.0},
        seed=np.uint64(3),
    )
    assert found == SamplingParams(max_new_tokens=8, top_k=5, stop_token_ids=(3,), logit_bias={4: 1.0}, seed=3)
    assert type(found.max_new_tokens) is type(found.top_k) is int
    encoder = PromptEncoder(None, 100)
    for ids in ([np.int64(5), 6], np.array([5, 6]), (5, np.int32(6))):
        assert encoder.encode({"prompt_token_ids": ids}, found)[0] == [5, 6]
    for wrong in ([5, 6.0], [True], np.array([5.5])):
        with pytest.raises(ConfigError, match="token ids are whole numbers from 0 to 99"):
            encoder.encode({"prompt_token_ids": wrong}, found)
