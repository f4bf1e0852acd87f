"""The tiny models that other tests lean on: they are what transformers wrote, and they say more than one word."""

from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, VOCAB_SIZE, left_padded, random_prompts, tiny_checkpoint, tiny_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from zinfer.weights import Checkpoint

MAX_NEW_TOKENS = 24


@pytest.mark.sampled(7)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [None, True, False])
def test_greedy_texts_are_full_length_and_varied(family: str, tie: bool | None) -> None:
    input_ids, attention_mask = left_padded(random_prompts(8))
    model = tiny_model(family, tie=tie)
    options = {"attention_mask": attention_mask, "max_new_tokens": MAX_NEW_TOKENS, "do_sample": False}
    rows = model.generate(input_ids=input_ids, **options)[:, input_ids.shape[1] :].tolist()
    assert all(len(row) == MAX_NEW_TOKENS for row in rows)
    distinct = [len(set(row)) for row in rows]
    print(family, tie, "distinct tokens of each text:", distinct)
    assert min(distinct) >= 6
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
def test_checkpoint_holds_the_model(family: str, tie: bool, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(family, tmp_path, tie=tie, shards=3, dtype=torch.bfloat16))
    assert len(checkpoint.files) >= 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = dict(model.named_parameters())
    assert sum(entry.nbytes for entry in checkpoint.tensors.values()) == sum(
        parameter.nbytes for parameter in expected.values()
    )
    assert ("lm_head.weight" in checkpoint.tensors) is not tie
    prefixed = {name.removeprefix("transformer."): parameter for name, parameter in expected.items()}
    for entry in checkpoint.tensors.values():
        parameter = prefixed[entry.name.removeprefix("transformer.")].detach()
        assert (entry.dtype, entry.shape) == (torch.bfloat16, tuple(parameter.shape))
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            stored = torch.frombuffer(bytearray(file.read(entry.nbytes)), dtype=entry.dtype).reshape(entry.shape)
        assert torch.equal(stored, parameter), entry.name


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    one, other, third = (
        {path.name: path.read_bytes() for path in tiny_checkpoint("qwen2", tmp_path / name, seed=seed).iterdir()}
        for name, seed in (("one", 0), ("other", 0), ("third", 1))
    )
    assert one == other
    assert one.keys() == third.keys()
    assert any(one[name] != third[name] for name in one if name.endswith(".safetensors"))


@pytest.mark.parametrize("shards", [1, 2, 4, 9])
def test_number_of_files(tmp_path: Path, shards: int) -> None:
    files = sorted(tiny_checkpoint("llama", tmp_path, shards=shards).glob("*.safetensors"))
    assert len(files) >= shards
    assert (tmp_path / "model.safetensors.index.json").exists() is (shards > 1)
    assert sum(len(list(safe_open(file, "pt").keys())) for file in files) == len(Checkpoint.open(tmp_path).tensors)


def test_prompts_are_mixed_and_padded_on_the_left() -> None:
    prompts = random_prompts(8)
    input_ids, attention_mask = left_padded(prompts)
    assert len({len(prompt) for prompt in prompts}) > 3
    assert attention_mask.sum(1).tolist() == [len(prompt) for prompt in prompts]
    assert [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)] == prompts
    assert int(input_ids.max()) < VOCAB_SIZE
