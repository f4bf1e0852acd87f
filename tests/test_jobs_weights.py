"""A job goes on with the weights that it began with, wherever they are now."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs_run_support import failing, job, never_made, output, prompts
from jobs_support import CHAT_TEMPLATE, letters_model, read_rows
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from zinfer.engine.engine import InferenceEngine
from zinfer.errors import JobError
from zinfer.jobs import UnusableInput
from zinfer.jobs.request import checksums_path
from zinfer.jobs.weights import Weights, WeightsFile
from zinfer.weights import Checkpoint
from zinfer.weights.checkpoint import weights_sample

__all__ = ["output", "prompts"]  # fixtures


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return letters_model(tmp_path / "model", chat_template=CHAT_TEMPLATE)


def manifest(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.with_name(output.name + ".manifest.json").read_text())
    return found


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def entries_of(model: Path) -> dict[str, WeightsFile]:
    return Weights(Checkpoint.open(model)).entries({})


def check_same(model: Path, former: dict[str, WeightsFile], notes: list[str]) -> None:
    weights = Weights(Checkpoint.open(model))
    weights.check_same(former, weights.entries(former), notes.append)


def set_back(file: Path, then: os.stat_result) -> None:
    """Give a changed file its old modification time; the time of its last change, which none can set, is another."""
    assert file.stat().st_size == then.st_size
    os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
    while file.stat().st_ctime_ns == then.st_ctime_ns:  # within one tick of the system's clock
        os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))


def stopped(model: Path, prompts: Path, output: Path, **options: Any) -> None:
    """A job with some rows, cut short."""
    with pytest.raises(JobError):
        job(model, prompts, output, engine_factory=failing(RuntimeError("boom")), **options)
    assert 0 < len(read_rows(output)) < 22


class Stopping(InferenceEngine):
    """Streams the model, and fails in its third batch."""

    num_calls = 0

    def generate_unchecked(self, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 3:
            raise RuntimeError("boom")
        return super().generate_unchecked(**kwargs)


def change_between_samples(model: Path, tensor: str, place: int) -> Path:
    """Change one bit that no sample covers; the file's times are others then."""
    entry = Checkpoint.open(model).tensors[tensor]
    before = {name: file.sample_sha256 for name, file in entries_of(model).items()}
    with entry.file.open("r+b") as file:
        file.seek(entry.offset + place)
        [byte] = file.read(1)
        file.seek(entry.offset + place)
        file.write(bytes([byte ^ 0x40]))
    assert {name: found.sample_sha256 for name, found in entries_of(model).items()} == before, "the test's own"
    return entry.file


def tune(file: Path) -> None:
    """Change all weights of a file a little, as further training does."""
    tensors = load_file(file)
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, file, {"format": "pt"})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_same_time", [True, False])
def test_other_weights_in_files_of_the_same_size_are_refused(
    model: Path, prompts: Path, output: Path, has_same_time: bool
) -> None:
    stopped(model, prompts, output)
    file = shards(model)[-1]
    then = file.stat()
    tune(file)
    assert file.stat().st_size == then.st_size
    if has_same_time:
        set_back(file, then)
    rows = output.read_bytes()
    with pytest.raises(UnusableInput, match=rf"model {file} holds other weights .*samples .* in the manifest, .* now"):
        job(model, prompts, output, engine_factory=never_made)
    assert output.read_bytes() == rows


def test_one_matrix_that_differs_is_refused_wherever_it_lies(tmp_path: Path) -> None:
    """Also between samples that are spread over a file, and in a file whose time is as it was."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 128}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path)
    file, notes, missed = tmp_path / "model.safetensors", list[str](), list[str]()
    former, then, tensors, spread = entries_of(tmp_path), file.stat(), load_file(file), weights_sample([file])
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 0.01}, file, {"format": "pt"})
        set_back(file, then)
        missed += [name] if weights_sample([file]) == spread else []
        with pytest.raises(UnusableInput, match=f"model {file} holds other weights"):
            check_same(tmp_path, former, notes)
    assert missed, "the test's own: one must lie between the samples of a file"
    save_file(tensors, file, {"format": "pt"})
    set_back(file, then)
    check_same(tmp_path, former, notes)
    [note] = notes
    assert note.startswith("1 weights files have other times than when this job began")


def test_files_with_their_sizes_and_times_are_not_read(model: Path) -> None:
    """An entry with another sample goes on, until any of its times is another one."""
    notes = list[str]()
    recorded = {name: replace(entry, sample_sha256="of a sample") for name, entry in entries_of(model).items()}
    assert Weights(Checkpoint.open(model)).entries(recorded) == recorded
    check_same(model, recorded, notes)
    assert notes == []
    file = shards(model)[0]
    set_back(file, file.stat())
    for former in (recorded, {name: replace(entry, ctime_ns=None) for name, entry in recorded.items()}):
        with pytest.raises(UnusableInput, match=f"model {file} holds other weights"):
            check_same(model, former, notes)


def test_a_folder_that_was_copied_goes_on(model: Path, prompts: Path, output: Path) -> None:
    stopped(model, prompts, output)
    copy = shutil.copytree(model, model.with_name("copy"), copy_function=shutil.copyfile)
    for file in shards(copy):
        os.utime(file, ns=(0, 0))
    summary = job(copy, prompts, output)
    assert summary.num_done + summary.num_skipped >= 22
    assert any("weights files have other times" in note for note in summary.notes)
    assert {file["mtime_ns"] for file in manifest(output)["weights"].values()} == {0}
    assert not any("other times" in note for note in job(copy, prompts, output).notes)


@pytest.mark.parametrize(
    ("home", "more"),
    [
        pytest.param({"device": "cpu"}, {}, id="in host memory"),
        pytest.param({"device": "nvme"}, {}, id="on the disk"),
        pytest.param({"device": "cpu"}, {"quantization": {"bits": 8}}, id="quantized while loading"),
        pytest.param({"device": "nvme", "nvme_path": "packed"}, {"quantization": {"bits": 8}}, id="a packed copy"),
    ],
)
def test_one_bit_between_samples_is_refused_as_it_is_read(
    model: Path, prompts: Path, output: Path, home: dict[str, str], more: dict[str, Any]
) -> None:
    if "nvme_path" in home:
        home = {**home, "nvme_path": f"{output.parent / home['nvme_path']}"}
    config = {"zero_optimization": {"stage": 3, "offload_param": home}, "zinfer": more}
    with pytest.raises(JobError, match="boom"):
        job(model, prompts, output, engine_factory=Stopping, config=config)
    rows = output.read_bytes()
    assert 0 < len(read_rows(output)) < 22
    file = change_between_samples(model, "model.layers.1.mlp.down_proj.weight", 9000)
    for _ in range(2):  # the refused run must not take the new times for those of the weights it began with
        with pytest.raises(UnusableInput, match=r"holds other weights than .*bytes \d+ to \d+, in .*1\.mlp\.down_proj"):
            job(model, prompts, output, engine_factory=InferenceEngine, config=config)
        assert output.read_bytes() == rows
    change_between_samples(model, "model.layers.1.mlp.down_proj.weight", 9000)
    copy = shutil.copytree(model, model.with_name("copy"), copy_function=shutil.copyfile)
    with pytest.raises(JobError, match="boom"):
        job(copy, prompts, output, engine_factory=Stopping, config=config)
    summary = job(copy, prompts, output, engine_factory=InferenceEngine, config=config)
    assert summary.num_done + summary.num_skipped >= 22
    assert not any("other times" in note for note in summary.notes), "all was compared by the run before"
    assert not checksums_path(output).exists()
    assert file.exists()


def test_weights_that_change_while_the_model_is_loaded_end_the_job(model: Path, prompts: Path, output: Path) -> None:
    engine = failing(RuntimeError("never"))

    def changing(*args: Any, **options: Any) -> Any:
        tune(shards(model)[0])
        return engine(*args, **options)

    with pytest.raises(JobError, match=r"safetensors was changed while the job ran"):
        job(model, prompts, output, engine_factory=changing)
    assert not output.exists()
