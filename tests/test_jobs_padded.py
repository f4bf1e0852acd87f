"""Decoding a batch: every row as if it were alone, by its own settings."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jobs_support import CHAT_TEMPLATE, ResidentEngine, letters_model, letters_tokenizer
from transformers.utils import is_mistral_common_available, is_sentencepiece_available

from zinfer.engine.finite_check import BEFORE
from zinfer.errors import CheckpointError
from zinfer.jobs.padded import complete
from zinfer.jobs.prompts import Prompt, encoded
from zinfer.jobs.rows import BadRow, Row
from zinfer.jobs.token_rows import padded
from zinfer.requests.completion import Completion
from zinfer.requests.length_limits import LengthLimits, Limit
from zinfer.requests.prompt_encoder import PromptEncoder, find_tokenizer
from zinfer.requests.sampling_params import SamplingParams

TOKENIZER = letters_tokenizer(chat_template=None)
ENCODER = PromptEncoder(TOKENIZER, 131, LengthLimits(Limit(128, "the model's positions")))
TEXTS = ("a", "hello you", "zinfer streams", "the quick brown fox jumps")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ResidentEngine:
    return ResidentEngine(str(letters_model(tmp_path_factory.mktemp("model"))))


def prompt(text: str, **fields: Any) -> Prompt:
    row_id = fields.pop("id", text)
    made = encoded(Row(id=row_id, prompt=text, params=SamplingParams(**{"max_new_tokens": 12, **fields})), 1, ENCODER)
    assert isinstance(made, Prompt)
    return made


def run(engine: ResidentEngine, *prompts: Prompt) -> list[Completion]:
    """The completions of prompts that ask for one each."""
    return [own[0] for own in complete(engine, prompts, TOKENIZER, lambda num_running: None)]


def test_greedy_rows_equal_transformers_own(engine: ResidentEngine) -> None:
    prompts = [prompt(text) for text in TEXTS]
    input_ids, attention_mask = padded([prompt.token_ids for prompt in prompts], 1, "left")
    expected = engine.generate(input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=12, do_sample=False)
    completions = run(engine, *prompts)
    new_tokens = expected[:, input_ids.shape[1] :].tolist()
    for completion, tokens in zip(completions, new_tokens, strict=True):
        number = tokens.index(2) + 1 if 2 in tokens else len(tokens)
        assert list(completion.token_ids) == tokens[:number]
    assert len({token for tokens in new_tokens for token in tokens}) >= 6


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.3}, {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 5}]
)
def test_a_row_does_not_depend_on_its_neighbours(engine: ResidentEngine, fields: dict[str, Any]) -> None:
    mixed = [
        prompt(TEXTS[0], temperature=3.0),
        prompt(TEXTS[1], **fields, max_new_tokens=9),
        prompt(TEXTS[2]),
        prompt(TEXTS[3], temperature=0.7, stop=("e",)),
    ]
    together = run(engine, *mixed)
    for number, row in enumerate(mixed):
        assert run(engine, row)[0] == together[number]
    assert run(engine, *reversed(mixed))[::-1] == together


def test_each_row_has_its_own_number_of_new_tokens(engine: ResidentEngine) -> None:
    completions = run(engine, *(prompt(f"p{number}", max_new_tokens=number) for number in (1, 7, 3)))
    assert [len(completion.token_ids) for completion in completions] == [1, 7, 3]
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_seeds_decide_and_default_to_the_id(engine: ResidentEngine) -> None:
    def tokens(row_id: str, **fields: Any) -> tuple[int, ...]:
        return run(engine, prompt("abc", id=row_id, temperature=3.0, **fields))[0].token_ids

    assert tokens("x") == tokens("x")
    assert tokens("x") != tokens("y")
    assert tokens("x", seed=1) == tokens("y", seed=1)
    assert tokens("x", seed=1) != tokens("x", seed=2)
    assert len(tokens("x", seed=2**64 - 1)) == 12


def test_temperature_zero_is_greedy(engine: ResidentEngine) -> None:
    assert run(engine, prompt("abc", temperature=0.0, seed=3))[0].text == run(engine, prompt("abc"))[0].text


def test_a_stop_string_cuts_the_text_and_keeps_the_tokens(engine: ResidentEngine) -> None:
    whole = run(engine, prompt("hello you"))[0]
    assert len(whole.token_ids) == 12
    stop = whole.text[4:7]
    end = next(num for num in range(13) if stop in TOKENIZER.decode(whole.token_ids[:num], skip_special_tokens=True))
    stopped, free = run(engine, prompt("hello you", stop=("never there", stop)), prompt("a"))
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.token_ids == whole.token_ids[:end]
    assert (stopped.finish_reason, stopped.stop_reason, free.stop_reason) == ("stop", stop, None)
    assert len(free.token_ids) == 12


def test_progress_counts_the_rows_that_still_run(engine: ResidentEngine) -> None:
    counts: list[int] = []
    prompts = [prompt("a", max_new_tokens=1), prompt("b", max_new_tokens=3)]
    complete(engine, prompts, TOKENIZER, counts.append)
    assert counts == [2, 1, 1]


def test_a_row_that_ignores_the_end_goes_on_and_one_that_must_not_end_yet_does_not(engine: ResidentEngine) -> None:
    ends = run(engine, prompt("hello you"))[0].token_ids[2]
    engine.module.generation_config.eos_token_id = ends
    try:
        plain, ignoring, later = run(
            engine, prompt("hello you"), prompt("hello you", ignore_eos=True), prompt("hello you", min_new_tokens=7)
        )
    finally:
        engine.module.generation_config.eos_token_id = 2
    assert (plain.finish_reason, plain.token_ids[-1]) == ("stop", ends)
    assert plain.text == TOKENIZER.decode(plain.token_ids[:-1])
    assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 12)
    assert ignoring.token_ids[: len(plain.token_ids)] == plain.token_ids
    assert len(later.token_ids) >= 7
    assert ends not in later.token_ids[:6]


def test_several_completions_of_a_row_have_draws_of_their_own(engine: ResidentEngine) -> None:
    several, alone = complete(
        engine,
        [prompt("abc", temperature=3.0, n=3, seed=1), prompt("abc", id=2, temperature=3.0, seed=1, logprobs=2)],
        TOKENIZER,
        lambda num_running: None,
    )
    assert len({completion.token_ids for completion in several}) == 3
    assert [completion.sample_index for completion in several] == [0, 1, 2]
    assert several[0].token_ids == alone[0].token_ids
    assert several[0].logprobs is None
    assert alone[0].logprobs is not None
    assert [len(each.top) for each in alone[0].logprobs] == [2] * len(alone[0].token_ids)


def test_logits_that_are_no_numbers_end_their_own_row(engine: ResidentEngine) -> None:
    embedding = engine.module.get_input_embeddings().weight
    kept = embedding[10].clone()
    damaged = TOKENIZER.decode([10])
    embedding.data[10] = math.nan
    try:
        broken, whole = run(engine, prompt("ab" + damaged), prompt("ab"))
    finally:
        embedding.data[10] = kept
    assert (broken.finish_reason, broken.token_ids) == ("error", ())
    assert "logits are not finite numbers" in str(broken.error)
    assert str(broken.error).endswith("the first non-finite numbers come from what comes before the first layer")
    assert whole == run(engine, prompt("ab"))[0]


@contextmanager
def broken_embedding(engine: ResidentEngine, token_id: int) -> Iterator[None]:
    weight = engine.module.get_input_embeddings().weight
    kept = weight[token_id].clone()
    weight.data[token_id] = math.nan
    try:
        yield
    finally:
        weight.data[token_id] = kept


def test_what_broke_each_row_of_a_batch_is_told_apart(engine: ResidentEngine) -> None:
    token_ids = prompt("zq").token_ids
    seen: list[torch.Tensor] = []

    def see(module: Any, args: Any, output: Any) -> None:
        seen.append(args[0] if args else output)

    def overflow(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.where((seen[-1] == token_ids[1]).any(dim=1)[:, None, None], torch.inf, output)

    hooks = [
        engine.module.get_input_embeddings().register_forward_hook(see),
        engine.module.model.layers[1].register_forward_hook(overflow),
    ]
    try:
        with broken_embedding(engine, token_ids[0]):
            found = run(engine, *map(prompt, ("az", "aaaq", "hello", "bz", "q")))
    finally:
        for hook in hooks:
            hook.remove()
    ends = [str(each.error).rpartition("come from ")[2] for each in found]
    assert ends == [BEFORE, "model.layers.1", "None", BEFORE, "model.layers.1"]
    assert found[2] == run(engine, prompt("hello"))[0]


def test_a_text_that_breaks_late_costs_no_other_of_its_row(engine: ResidentEngine) -> None:
    row, seen = prompt("abc", temperature=3.0, n=4, seed=1), list[int]()
    (before,) = complete(engine, [row], TOKENIZER, seen.append)
    others = {token for each in before if each.sample_index != 2 for token in each.token_ids}
    place = next(place for place in range(2, 11) if before[2].token_ids[place] not in others)
    steps: list[int] = []
    with broken_embedding(engine, before[2].token_ids[place]):
        (found,) = complete(engine, [row], TOKENIZER, steps.append)
    assert str(found[2].error).endswith(f"come from {BEFORE}")
    assert found[2].token_ids == before[2].token_ids[: place + 1]
    assert [found[number] for number in (0, 1, 3)] == [before[number] for number in (0, 1, 3)]
    assert len(steps) == len(seen), "what is computed again is no progress"


def bad(**fields: Any) -> str:
    made = encoded(Row(id=1, params=SamplingParams(max_new_tokens=12), **fields), 1, ENCODER)
    assert isinstance(made, BadRow)
    return made.message


def test_rows_that_do_not_fit_are_told_the_numbers() -> None:
    assert "the prompt has 128 tokens, which leaves no room for new ones within 128 (the model's positions)" in bad(
        prompt="a" * 128
    )
    message = bad(prompt="a" * 120)
    assert "the prompt's 120 tokens and 12 new ones are more than 128 (the model's positions)" in message
    assert "ask for at most 8 new tokens" in message
    assert prompt("a" * 120, max_new_tokens=8).max_new_tokens == 8


def test_texts_longer_than_the_tokenizers_own_limit_are_nothing_to_warn_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(transformers.tokenization_utils_base.logger, "warning", said.append)
    tokenizer = letters_tokenizer()
    tokenizer.model_max_length = 4
    encoder = PromptEncoder(tokenizer, 131)
    assert len(encoder.encode("a" * 9, SamplingParams())[0]) == 9
    encoded = encoder.encode_texts([("a" * 9, SamplingParams())])
    assert encoded == [{"prompt_token_ids": tokenizer("a" * 9, verbose=False).input_ids}]
    assert encoder.bad_word_ids(SamplingParams(bad_words=("a" * 9,)))
    assert said == []
    tokenizer("a" * 9)
    assert len(said) == 1, "which it would say"


def test_an_empty_prompt_begins_with_bos() -> None:
    assert prompt("").token_ids == (0,)
    tokenizer = letters_tokenizer()
    tokenizer.bos_token = None
    made = encoded(Row(id=1, prompt=""), 3, PromptEncoder(tokenizer, 131))
    assert made == BadRow(1, "line 3: the prompt has no tokens, and the tokenizer has no bos token to begin with")


def test_a_tokenizer_of_another_model_is_noticed() -> None:
    made = encoded(Row(id=1, prompt="~"), 3, PromptEncoder(TOKENIZER, 50))
    assert isinstance(made, BadRow)
    assert "the tokenizer returned token 97 ('~'), but the model has tokens 0 to 49 (vocab_size 50)" in made.message
    assert made.message.endswith("belongs to another model; put the model's own into the folder")


def test_an_added_token_that_the_model_lacks_is_named_in_jobs_and_in_python(tmp_path: Path) -> None:
    tokenizer = letters_tokenizer(chat_template=None)
    tokenizer.add_tokens(["<extra>"])
    wrong = tokenizer.convert_tokens_to_ids("<extra>")
    encoder = PromptEncoder(tokenizer, wrong)
    message = (
        f"token {wrong} ('<extra>'), but the model has tokens 0 to {wrong - 1} (vocab_size {wrong}): it was added to"
    )
    made = encoded(Row(id=1, prompt="a <extra> b"), 1, encoder)
    assert isinstance(made, BadRow)
    assert message in made.message
    assert (
        encoder.encode_texts([(text, SamplingParams()) for text in ("ab", "a <extra> b")])[1] == "a <extra> b"
    )  # which `encode` refuses


def test_messages_go_through_the_chat_template() -> None:
    messages = ({"role": "user", "content": "hi"},)
    tokenizer = letters_tokenizer(chat_template=CHAT_TEMPLATE)
    made = encoded(Row(id=1, messages=messages), 1, PromptEncoder(tokenizer, 131))
    assert isinstance(made, Prompt)
    assert tokenizer.decode(made.token_ids) == "user:hi;reply:"
    refused = encoded(Row(id=1, messages=({"role": "tool", "content": ""},)), 1, PromptEncoder(tokenizer, 131))
    assert refused == BadRow(1, "line 1: messages: the chat template refuses them: no tools here")
    assert "has no chat template; give the prompt as text instead" in bad(messages=messages)


def test_no_model_folder_with_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"has no tokenizer that loads .*; put the model's tokenizer files into"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "is_there", "remedy"),
    [
        (
            "tokenizer.model",
            is_sentencepiece_available,
            r"has tokenizer.model, a sentencepiece tokenizer, .*; .*`pip install sentencepiece protobuf`",
        ),
        ("tekken.json", is_mistral_common_available, r"has tekken.json, .* run `pip install mistral-common`"),
    ],
)
def test_a_tokenizer_whose_packages_are_missing_names_them(
    file: str, is_there: Callable[[], bool], remedy: str, tmp_path: Path
) -> None:
    if is_there():
        pytest.skip("the package is installed")
    letters_model(tmp_path)
    for each in tmp_path.glob("tokenizer*"):
        each.unlink()
    (tmp_path / file).write_bytes(b"\x0e\x0a")
    with pytest.raises(CheckpointError, match=remedy):
        find_tokenizer(tmp_path)
