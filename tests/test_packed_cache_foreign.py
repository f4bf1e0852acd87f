"""A store that an engine makes of what another tool has quantized: the same logits from disk, or a refusal in time."""

from pathlib import Path

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_mixtral
from packed_cache_support import engine_of, only, start
from store_support import document
from test_foreign_engine import GROUP_SIZE, write_quantized, write_quantized_experts

import zinfer.store.caches
from zinfer.errors import ConfigError


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    input_ids, attention_mask = left_padded(random_prompts(3, seed=5))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["gptq", "gptq in activation order", "awq"])
def test_other_tools_checkpoints_need_no_rules(
    tmp_path: Path, batch: dict[str, torch.Tensor], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_quantized(folder, method)
    with engine_of(folder, None, home="cpu") as engine:
        expected = engine(**batch).logits
    with engine_of(folder, tmp_path / "nvme") as engine:
        assert torch.equal(engine(**batch).logits, expected)
        assert engine.stats().blocks_by_home["DISK"] == 3
    assert {name.rsplit(".", 2)[-2] for name in document(only(tmp_path / "nvme"))["parameters"]} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    monkeypatch.setattr(zinfer.store.caches, "write_store", None)
    start(folder, tmp_path / "nvme")


def test_experts_quantized_one_by_one_stream_from_a_store(tmp_path: Path, batch: dict[str, torch.Tensor]) -> None:
    folder = tmp_path / "model"
    write_quantized_experts(folder, "gptq", tiny_mixtral(), GROUP_SIZE)
    with engine_of(folder, None, home="cpu") as engine:
        expected = engine(**batch).logits
    with engine_of(folder, tmp_path / "nvme") as engine:
        assert torch.equal(engine(**batch).logits, expected)
        assert engine.stats().blocks_by_home["DISK"] == 2
    assert {name.rpartition(".")[2] for name in document(only(tmp_path / "nvme"))["parameters"]} == {
        *("gate_up_proj", "down_proj")
    }


def test_rules_beside_a_quantized_checkpoint_are_refused_before_anything_is_written_or_work(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_quantized(folder, "gptq")
    for home in ("cpu", "nvme"):
        with pytest.raises(ConfigError, match=r"activations: model\.layers\.0.* set it to false, leave the weight out"):
            start(folder, tmp_path / "nvme", {"bits": 8, "activations": True}, home=home)
    assert not (tmp_path / "nvme").exists()
    start(folder, tmp_path / "nvme", {"bits": 4, "group_size": 48})  # divides no matrix that it would be for
    start(only(tmp_path / "nvme"), None, {"bits": 4, "group_size": 48})
