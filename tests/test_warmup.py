"""Kernels are compiled ahead by passes of a few layers, and a job finds them."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from checkpoints import tiny_checkpoint, tiny_mixtral
from jobs_support import letters_model, prompt_rows, write_rows
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from zinfer.batching.ragged import BatchBuilder, RaggedBatch
from zinfer.cli import app
from zinfer.engine import kernel_cache
from zinfer.errors import JobError
from zinfer.jobs.warmup import warm_up
from zinfer.model.stage import ShorterModel

ON_CPU = {"zinfer": {"device": "cpu"}}


@pytest.mark.slow
def test_layers_of_each_kind_are_computed(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama", num_layers=6)
    files = sorted(folder.iterdir())
    done = warm_up(folder, ON_CPU)
    assert (done.num_layers, done.num_all) == (1, 6)
    assert done.num_passes >= 20, "down to one row"
    assert done.num_tokens > 1000
    tiny_mixtral().save_pretrained(tmp_path / "mixtral")
    assert warm_up(tmp_path / "mixtral", ON_CPU).num_layers == 1
    assert sorted(folder.iterdir()) == files


def test_passes_have_all_sizes_and_kinds_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, batches = tiny_checkpoint("llama", tmp_path / "llama", num_layers=2), list[RaggedBatch]()
    build = BatchBuilder.build

    def noted(*given: Any, **options: Any) -> RaggedBatch:
        batches.append(build(*given, **options))
        return batches[-1]

    monkeypatch.setattr(BatchBuilder, "build", noted)
    warm_up(folder, {"zinfer": {**ON_CPU["zinfer"], "tokens_per_pass": 600, "max_sequences": 20}})
    sizes = {batch.num_tokens for batch in batches}
    assert sizes >= {600, *range(1, 11), 300, 150, 75, 37, 18}
    firsts = {batch.parts[0].layout.num_decodes for batch in batches}
    assert firsts > {None, 0, 1, 10}, "decodes alone, prompts alone, both, and a prompt of one token behind others"


@pytest.mark.parametrize(
    ("kind", "changes", "num_layers"),
    [
        ("gemma2", {"num_hidden_layers": 4}, 2),  # of which every second has a window
        ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 2}, 3),
        ("opt", {"num_hidden_layers": 4}, 1),
    ],
)
def test_kinds_are_told_by_the_config_and_by_shapes(kind: str, changes: dict[str, Any], num_layers: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **changes))
    shorter = ShorterModel.of_each_kind(model)
    whole = list(model.state_dict())
    assert len(shorter.layers) == num_layers
    shorter.apply()
    assert model.config.num_hidden_layers == num_layers
    assert 0 < len(model.state_dict()) < len(whole)
    shorter.undo()
    assert list(model.state_dict()) == whole


@pytest.mark.slow
def test_ranks_traces_and_packed_weights_are_left_out(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama", num_layers=2)
    (tmp_path / "packed").mkdir()
    own = {"device": "cpu", "parallel": {"tensor": 2}, "trace": str(tmp_path / "t.json"), "quantization": {"bits": 8}}
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "packed")}
    config = {"zinfer": own, "zero_optimization": {"offload_param": offload}, "tensor_parallel": {"tp_size": 2}}
    assert warm_up(folder, config).num_passes > 0
    assert not list((tmp_path / "packed").iterdir())
    assert not (tmp_path / "t.json").exists()


def test_layers_without_finite_outputs_are_an_error(tmp_path: Path) -> None:
    model = tiny_mixtral()
    torch.nn.init.constant_(model.model.layers[0].input_layernorm.weight, torch.inf)
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(JobError, match="its first layers cannot be computed alone, so it is not warmed up: "):
        warm_up(tmp_path / "broken", ON_CPU)


def test_the_command_needs_a_gpu(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama", num_layers=2)
    (tmp_path / "ds.json").write_text(json.dumps(ON_CPU))
    result = CliRunner().invoke(app, ["warmup", "--model", str(folder), "--config", str(tmp_path / "ds.json")])
    assert result.exit_code == 2
    assert "kernels are compiled for a GPU, and this job would run on the CPU" in " ".join(result.stderr.split())


def test_a_job_runs_where_kernels_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(logging.getLogger("zinfer"), "propagate", True)
    monkeypatch.setattr(kernel_cache, "triton_key", str)  # it would hash Triton's files in a thread beside
    kernel_cache.ensure_kernel_cache.cache_clear()
    kernel_cache.ensure_kernel_cache()
    assert "compiled kernels cannot be kept there (Not a directory); set TRITON_CACHE_DIR" in caplog.text
    assert kernel_cache.check_kernel_cache().is_dir()
    kernel_cache.ensure_kernel_cache.cache_clear()
    kernel_cache.ensure_kernel_cache()
    assert len(caplog.records) == 1


@pytest.mark.gpu
def test_a_job_finds_its_kernels_compiled(tmp_path: Path) -> None:
    letters_model(tmp_path / "model", num_layers=4)
    write_rows(tmp_path / "in.jsonl", prompt_rows(40))
    kernels = tmp_path / "kernels"

    def compiled_after(*words: str) -> set[str]:
        command = [sys.executable, "-m", "zinfer", *words, "--model", "model"]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(kernels)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return {str(path.relative_to(kernels)) for path in kernels.rglob("*.cubin")}

    ahead = compiled_after("warmup")
    assert ahead
    assert compiled_after("run", "--input", "in.jsonl", "--output", "out.jsonl", "--ranks", "1") == ahead
