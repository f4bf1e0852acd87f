"""Text of tokens as they come: together it is what all of them add to the prompt's, whatever tokenizer made them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs_support import letters_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zinfer.requests.detokenizer import Detokenizer
from zinfer.requests.prompt_end import find_prompt_end
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.stop_criteria import StopCriteria

WORDS = ["▁", "▁a", "a", "b", "ab", "c", "▁bc", "▁▁", ".", "é", "'s", "▁€", "!"]


def with_decoder(vocabulary: list[str], decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, vocabulary[0]))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As LLaMA's: bytes that no token has are tokens of their own, and the text's first space is dropped."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pieces = [f"<0x{byte:02X}>" for byte in (0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0x41, 0xFF, 0xF0, 0x9F, 0x98, 0x80)]
    return with_decoder(["<unk>", "<s>", "</s>", *pieces, *WORDS], decoders.Sequence(steps))


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's: each token is some bytes of a text, not always whole characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return with_decoder(["<unk>", "<s>", "</s>", *letters, "Ġa", "âĤ", "ab", "Ã©"], decoders.ByteLevel())


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT's: words, parts of words, and spaces that are cleaned up before full stops."""
    pieces = ["the", "##ing", "##s", "do", "not", ".", ",", "n't", "'s", "a", "?"]
    return with_decoder(["<unk>", "<s>", "</s>", *pieces], decoders.WordPiece("##", cleanup=True))


def metaspace() -> PreTrainedTokenizerFast:
    return with_decoder(["<unk>", "<s>", "</s>", *WORDS], decoders.Metaspace())


def word_ends() -> PreTrainedTokenizerFast:
    """As GPT-1's: a token says where a word ends."""
    return with_decoder(["<unk>", "<s>", "</s>", "a</w>", "b", "c</w>", ".</w>"], decoders.BPEDecoder("</w>"))


TOKENIZERS = {
    made.__name__: made() for made in (byte_fallback, byte_level, word_piece, metaspace, word_ends, letters_tokenizer)
}


def texts(name: str, prompt: list[str], tokens: list[str], *, is_formed: bool = False) -> tuple[str, str]:
    """What tokens add to a prompt, by the text of all of them, and what there is of it as they come."""
    tokenizer = TOKENIZERS[name]
    prompt_ids, token_ids = map(tokenizer.convert_tokens_to_ids, (prompt, tokens))
    end = find_prompt_end(tokenizer, prompt_ids, skips_special=True, is_formed=is_formed)
    detokenizer = Detokenizer(tokenizer, prompt_end=end)
    found = "".join(map(detokenizer.add, token_ids))
    return StopCriteria(tokenizer, SamplingParams(), (), end).text(token_ids), found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_deltas_are_the_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    skips = data.draw(st.booleans())
    prompt_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=10))
    end = find_prompt_end(tokenizer, prompt_ids, skips_special=skips)
    whole = tokenizer.decode(token_ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
    pieces = whole[0:2], whole[1:4], whole[-3:], "a.", "xyz", "€"
    stop = tuple(data.draw(st.lists(st.sampled_from([piece for piece in pieces if piece]), max_size=2)))
    params = SamplingParams(
        max_new_tokens=30,
        min_new_tokens=data.draw(st.integers(0, 4)),
        stop=stop,
        skip_special_tokens=skips,
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    criteria = StopCriteria(tokenizer, params, {tokenizer.eos_token_id} if data.draw(st.booleans()) else (), end)
    detokenizer, found, seen = Detokenizer(tokenizer, stop, skips_special=skips, prompt_end=end), "", []
    for token_id in token_ids:
        seen.append(token_id)
        if criteria.reason(seen) is not None:
            break
        found += detokenizer.add(token_id)
    text = criteria.text(seen)
    assert text.startswith(found)
    assert len(found) == detokenizer.num_chars


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_texts_of_prompt_and_output_are_that_of_both(name: str, data: st.DataObject) -> None:
    """Wherever the prompt's text begins that of both; it does not if it ends within a character, or in wrong bytes."""
    tokenizer = TOKENIZERS[name]
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    prompt_ids, token_ids, skips = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    before, both = (
        tokenizer.decode(each, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        for each in (prompt_ids, prompt_ids + token_ids)
    )
    end = find_prompt_end(tokenizer, prompt_ids, skips_special=skips)
    text = StopCriteria(tokenizer, SamplingParams(skip_special_tokens=skips), (), end).text(token_ids)
    if both.startswith(before) and not before.endswith("\ufffd"):
        assert before + text == both
    detokenizer = Detokenizer(tokenizer, skips_special=skips, prompt_end=end)
    assert text.startswith("".join(map(detokenizer.add, token_ids)))


@pytest.mark.parametrize(
    ("name", "prompt", "tokens", "wanted"),
    [
        ("byte_fallback", ["<s>", "▁a"], ["▁a", "▁bc"], " a bc"),
        ("byte_fallback", ["▁a", "<0x41>"], ["▁", "▁", "▁", "▁"], "    "),
        ("byte_fallback", ["▁"], ["▁a"], " a"),
        ("byte_fallback", ["a", "</s>", *["<s>"] * 9], ["▁a"], " a"),
        ("byte_fallback", [], ["▁a", "▁a"], "a a"),
        ("byte_fallback", ["<s>", "</s>"], ["▁a", "▁a"], "a a"),
        ("byte_fallback", ["<0xE2>", "<0x82>", "<0xAC>"] * 9, ["▁a", "<0xFF>", "a"], " a\ufffda"),
        ("byte_fallback", ["▁", "<0xE2>", "<0x82>", "<0xAC>"], ["<0xFF>", "▁a"], "\ufffd a"),
        ("byte_fallback", ["a", "<0xF0>", "<0x9F>"], ["<0x98>", "<0x80>", "a"], "😀a"),
        ("byte_fallback", ["a", "<0xF0>", "<s>", "<0x9F>"], ["▁a"], " a"),
        ("byte_level", ["a", "âĤ"], ["¬", "Ġa"], "€ a"),
        ("byte_level", ["a", "âĤ"], ["b"], "b"),
        ("metaspace", ["<s>", "▁a"], ["▁▁", "c"], "  c"),
        ("metaspace", ["<s>"], ["▁a", "▁a"], "a a"),
        ("word_piece", ["do"], ["##ing", "the", "n't"], "ing then't"),
        ("word_piece", ["a", "do"], ["not"], " not"),
        ("word_ends", ["a</w>"], ["b", "a</w>"], " ba"),
    ],
)
def test_text_reads_as_behind_the_prompt(name: str, prompt: list[str], tokens: list[str], wanted: str) -> None:
    assert texts(name, prompt, tokens) == (wanted, wanted)


@pytest.mark.parametrize("prompt", [["<s>"], ["▁a"], ["<0x41>"], []])
def test_behind_any_prompt_a_formed_text_is_whole(prompt: list[str]) -> None:
    assert texts("byte_fallback", prompt, ["▁", "▁", "c"], is_formed=True) == ("  c", "  c")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_words_are_not_kept_back(name: str) -> None:
    """Without stop strings and half characters, a token's text is there at once."""
    tokenizer = TOKENIZERS[name]
    detokenizer, seen, found = Detokenizer(tokenizer), [], ""
    for token_id in [len(tokenizer) - 1, len(tokenizer) - 2] * 3:
        seen.append(token_id)
        found += detokenizer.add(token_id)
        assert found == tokenizer.decode(seen, clean_up_tokenization_spaces=False)
    assert found


def test_halves_of_characters_and_beginnings_of_stop_strings_wait() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    tokens = tokenizer.convert_tokens_to_ids(["a", "âĤ", "¬", "ab", "a", "b", "Ġa"])
    detokenizer = Detokenizer(tokenizer, ("abc", "b c"))
    assert [detokenizer.add(token) for token in tokens] == ["", "", "a€", "", "ab", "", "ab "]
