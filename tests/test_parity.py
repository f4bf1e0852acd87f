"""A streamed model says what transformers says, and to the bit what it says when resident, wherever blocks live."""

from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, left_padded, random_prompts, tiny_checkpoint
from engines import HOMES, distinct_tokens, engine_for
from transformers import AutoModelForCausalLM, PreTrainedModel

from zinfer.offload.stats import RunStats

NUM_NEW_TOKENS = 24
STREAMED = tuple(homes for homes in HOMES if homes != "resident")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param), num_layers=7, shards=2)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    return padded_batch()


def padded_batch() -> dict[str, torch.Tensor]:
    input_ids, attention_mask = left_padded(random_prompts(5, seed=3))
    assert len(set(attention_mask.sum(dim=1).tolist())) > 2, "the batch must mix lengths"
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@cache
def eager(folder: Path, device: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).to(device).eval()


@cache
def reference(folder: Path, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and prompt logits of plain transformers."""
    model = eager(folder, device)
    inputs = {name: tensor.to(device) for name, tensor in padded_batch().items()}
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False), model(**inputs).logits


@pytest.mark.sampled(10)
@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("num_slots", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_tokens_and_logits_equal_transformers(
    folder: Path, batch: dict[str, torch.Tensor], homes: str, num_slots: int, device: str
) -> None:
    tokens, logits = reference(folder, device)
    assert distinct_tokens(tokens[:, batch["input_ids"].shape[1] :]) >= 6
    with engine_for(folder, homes, num_slots, device) as engine:
        assert torch.equal(engine.generate(**batch, max_new_tokens=NUM_NEW_TOKENS, do_sample=False), tokens)
        assert torch.equal(engine(**batch).logits, logits)
        check_homes_and_bytes(engine.stats(), homes)


def check_homes_and_bytes(stats: RunStats, homes: str) -> None:
    by_home = stats.blocks_by_home
    used = {name for name, count in by_home.items() if count}
    expected = {"resident": {"DEVICE"}, "host": {"HOST"}, "disk": {"DISK"}, "mixed": {"DEVICE", "HOST", "DISK"}}
    assert used == expected[homes], by_home
    assert stats.passes == NUM_NEW_TOKENS + 1
    assert stats.bytes_to_device >= stats.passes * stats.streamed_bytes_per_pass
    assert stats.bytes_read_disk >= stats.passes * stats.disk_bytes_per_pass
    assert (stats.streamed_bytes_per_pass == 0) == (homes == "resident")
    assert (stats.disk_bytes_per_pass == 0) == (homes in ("resident", "host"))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("homes", STREAMED)
def test_the_synchronous_twin_gives_the_same_bits(
    folder: Path, batch: dict[str, torch.Tensor], homes: str, device: str
) -> None:
    with engine_for(folder, homes, 3, device) as engine:
        overlapped = [engine(**batch).logits for _ in range(3)]
    with engine_for(folder, homes, 3, device, synchronous=True) as engine:
        assert engine.settings.synchronous
        assert all(torch.equal(engine(**batch).logits, logits) for logits in overlapped)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("homes", ["disk", "mixed"])
def test_a_row_of_a_padded_batch_equals_the_prompt_alone(folder: Path, homes: str, device: str) -> None:
    prompts = random_prompts(4, seed=5)
    input_ids, attention_mask = left_padded(prompts)
    with engine_for(folder, homes, 2, device) as engine:
        together = engine.generate(
            input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=12, do_sample=False
        )
        for row, prompt in zip(together, prompts, strict=True):
            ids = torch.tensor([prompt])
            alone = engine.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
            )
            assert row[-12:].tolist() == alone[0, -12:].tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("homes", ["disk", "host"])
def test_sampling_follows_the_seed_as_in_transformers(
    folder: Path, batch: dict[str, torch.Tensor], homes: str, device: str
) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 20}
    model = eager(folder, device)
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    torch.manual_seed(11)
    expected = model.generate(**inputs, **options)
    with engine_for(folder, homes, 2, device) as engine:
        torch.manual_seed(11)
        assert torch.equal(engine.generate(**batch, **options), expected)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("homes", STREAMED)
def test_a_cast_on_the_way_equals_a_cast_beforehand(
    folder: Path, batch: dict[str, torch.Tensor], dtype: torch.dtype, homes: str, device: str
) -> None:
    with engine_for(folder, "resident", 2, device, dtype=dtype) as engine:
        expected = engine(**batch).logits
        assert expected.dtype == dtype
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    with torch.no_grad():
        assert torch.equal(model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits, expected)
    with engine_for(folder, homes, 2, device, dtype=dtype) as engine:
        assert torch.equal(engine(**batch).logits, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("homes", STREAMED)
def test_tied_and_untied_heads(
    tmp_path: Path, batch: dict[str, torch.Tensor], tie: bool, homes: str, device: str
) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=7, tie=tie)
    _, logits = reference(folder, device)
    with engine_for(folder, homes, 2, device) as engine:
        assert torch.equal(engine(**batch).logits, logits)
        assert torch.equal(engine(**batch).logits, logits)
        names = engine.stats().blocks_by_home
        assert sum(names.values()) == (9 if tie else 10), "tied embedding and head are one block"
