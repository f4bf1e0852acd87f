"""Parts of ranks that divide layers, kept by `save_mp_checkpoint_path` for later starts."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_model
from jobs_support import letters_model, prompt_rows, write_rows
from ranks_support import run_ranks
from test_foreign_engine import write_quantized
from test_tensor_parallel import IDS, Found, check_alike, computed, config
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zinfer
from zinfer.config import resolve_settings
from zinfer.errors import CheckpointError, ConfigError
from zinfer.jobs.job import run_job
from zinfer.jobs.summary import JobSummary

INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def later(rank: int, jobs: list[Any], folder: Path, settings: dict[str, Any]) -> tuple[list[Found], torch.Tensor]:
    """What jobs compute, and logits of a module without weights, whose checkpoint is the list of parts."""
    found = computed(rank, jobs)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    engine = zinfer.init_inference(module, settings)
    try:
        return found, engine(IDS).logits.clone()
    finally:
        engine.destroy()


@pytest.mark.slow
def test_a_later_start_reads_the_parts(tmp_path: Path) -> None:
    """Of full weights, and of codes of heads in pairs that another tool quantized."""
    llama, uneven = tiny_checkpoint("llama", tmp_path / "llama", num_layers=2, tie=False), tmp_path / "uneven"
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6}
    torch.manual_seed(0)
    write_quantized(uneven, "gptq", LlamaForCausalLM(LlamaConfig(**shape, vocab_size=131)).eval())
    cases = {"full": llama, "uneven": uneven}
    alone = computed(0, [(folder, config(1), INPUTS) for folder in cases.values()])
    saving = [
        (folder, config(2) | {"save_mp_checkpoint_path": str(tmp_path / "parts" / name)}, INPUTS)
        for name, folder in cases.items()
    ]
    check_alike(run_ranks(2, computed, saving), alone, [*cases])
    homes = ("nvme", "cpu")
    again = [(tmp_path / "parts" / name, config(2, home), INPUTS) for name, home in zip(cases, homes, strict=True)]
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "parts", moved)
    again = [(moved / folder.name, settings, inputs) for folder, settings, inputs in again]
    for path in (llama, uneven):
        shutil.move(path, path.with_name(f"{path.name} away"))
    settings = config(2) | {"checkpoint": str(moved / "full" / "ds_inference_config.json")}
    found = run_ranks(2, later, again, moved / "full" / "tp-0-of-2", settings)
    check_alike([ranks for ranks, _ in found], alone, [*cases])
    for ranks, logits in found:
        assert torch.allclose(logits, alone[0][0]["logits"], rtol=1e-4, atol=1e-4)
        assert ranks[0][2].blocks_by_home["DISK"] > 0
        assert ranks[0][2].bytes_read_disk < 12 * 0.6 * alone[0][2].loaded_bytes
    listing = json.loads((moved / "full" / "ds_inference_config.json").read_text())
    assert listing["checkpoints"]["tp"] == ["tp-0-of-2", "tp-1-of-2"]
    assert (listing["parallelization"], listing["tp_size"]) == ("tp", 2)
    check_refusals(moved)


def check_refusals(parts: Path) -> None:
    """One process has no parts, and a part is no model."""
    with pytest.raises(ConfigError, match=r"full.ds_inference_config.json: holds the parts of 2 ranks, and .* = 1"):
        zinfer.init_inference(parts / "full", device="cpu")
    with pytest.raises(ConfigError, match=r"tp-0-of-2: holds the part of each layer of rank 0 of 2, and this one has "):
        zinfer.init_inference(parts / "full" / "tp-0-of-2", device="cpu")
    with pytest.raises(ConfigError, match="keeps the parts of ranks that divide layers, and these do not; state "):
        zinfer.init_inference(parts / "full", device="cpu", save_mp_checkpoint_path="elsewhere")


def refused(rank: int, folder: Path, parts: Path, theirs: Path) -> list[str]:
    """What is said of parts that cannot be kept or read."""
    said = []
    module = zinfer.quantize_transformer(tiny_model("llama", num_layers=1))
    for model, more in ((module, {"save_mp_checkpoint_path": parts}), (module, {"checkpoint": theirs}), (folder, {})):
        try:
            zinfer.init_inference(model, config(2) | {key: str(path) for key, path in more.items()}).destroy()
            said.append("")
        except (ConfigError, CheckpointError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_kept_or_read_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=1)
    listing = {"type": "bloom", "version": 1.0, "parallelization": "tp", "tp_size": 2}
    theirs = tmp_path / "ds_inference_config.json"
    theirs.write_text(json.dumps(listing | {"checkpoints": {"non_tp": [], "tp": ["tp_00_02.pt", "tp_01_02.pt"]}}))
    for in_memory, pickled, whole in run_ranks(2, refused, folder, tmp_path / "parts", theirs):
        assert in_memory.startswith("save_mp_checkpoint_path: the module is quantized in memory, and parts are made of")
        assert "tp_0" in pickled
        assert "is no part that save_mp_checkpoint_path wrote here (parts of DeepSpeed's are pickled)" in pickled
        assert whole == ""
    with pytest.raises(ConfigError, match="as many parts as tp_size says"):
        resolve_settings({"checkpoint": listing | {"checkpoints": {"tp": ["a"]}}})


def from_memory(rank: int, parts: Path, seeds: list[int]) -> list[torch.Tensor | str]:
    """Logits of modules in memory whose parts are kept, then of the parts."""
    found: list[torch.Tensor | str] = []
    models: list[Any] = [tiny_model("llama", num_layers=2, seed=seed) for seed in seeds]
    for model in (*models, parts):
        keeps = {} if model is parts else {"save_mp_checkpoint_path": str(parts)}
        try:
            engine = zinfer.init_inference(model, config(2) | keeps)
            found.append(engine(IDS).logits.clone())
            engine.destroy()
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_a_module_in_memory_keeps_its_parts(tmp_path: Path) -> None:
    """Once: the same weights find them again, others are refused."""
    with torch.no_grad():
        wanted = tiny_model("llama", num_layers=2, seed=0)(IDS).logits
    for first, again, other, later in run_ranks(2, from_memory, tmp_path / "parts", [0, 0, 1]):
        for each in (first, again, later):
            torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-4)
        assert "belongs to another store; what differs" in other
    assert sorted(os.listdir(tmp_path / "parts")) == ["ds_inference_config.json", "tp-0-of-2", "tp-1-of-2"]


def jobs(rank: int, folder: Path) -> list[JobSummary]:
    """A job of two replicas that quantizes and keeps their parts, and one that begins with them."""
    found = []
    for name, model, keeps in (("first", "model", True), ("second", "parts", False)):
        codes = {"zinfer": {"quantization": {"bits": 8}}}
        more = codes | {"save_mp_checkpoint_path": str(folder / "parts")} if keeps else {}
        config = {"tensor_parallel": {"tp_size": 2}, **more}
        output = folder / f"{name}.jsonl"
        found.append(run_job(folder / model, folder / "in.jsonl", output, config=config, device="cpu", batch_size=3))
    return found


def test_jobs_keep_parts_and_begin_with_them(tmp_path: Path) -> None:
    letters_model(tmp_path / "model")
    write_rows(tmp_path / "in.jsonl", prompt_rows(12))
    first, second = run_ranks(4, jobs, tmp_path)[0]
    assert sorted(os.listdir(tmp_path / "parts")) == ["ds_inference_config.json", "tp-0-of-2", "tp-1-of-2"]
    rows = [sorted((tmp_path / f"{name}.jsonl").read_bytes().splitlines()) for name in ("first", "second")]
    assert len(rows[0]) == 12
    assert rows[0] == rows[1]
    assert [len(each.other_ranks) for each in (first, second)] == [3, 3]
    assert second.stats.bytes_read_disk < first.stats.bytes_read_disk / 4
