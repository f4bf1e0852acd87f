"""A job goes on with the very weights that it began with, wherever they are now; their checksums cost no reads."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from checkpoints import tiny_checkpoint
from jobs_run_support import failing, job, never_made, output, prompts
from jobs_support import CHAT_TEMPLATE, letters_model, read_rows

from zinfer.checkpoint import Checkpoint
from zinfer.config import resolve_settings
from zinfer.engine.engine import InferenceEngine
from zinfer.errors import JobError
from zinfer.jobs import UnusableInput
from zinfer.jobs.weights import Weights

__all__ = ["output", "prompts"]  # fixtures


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return letters_model(tmp_path / "model", chat_template=CHAT_TEMPLATE)


def manifest(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.with_name(output.name + ".manifest.json").read_text())
    return found


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def stopped(model: Path, prompts: Path, output: Path, **options: Any) -> None:
    """A job with some rows, cut short."""
    with pytest.raises(JobError):
        job(model, prompts, output, engine_factory=failing(RuntimeError("boom")), **options)
    assert 0 < len(read_rows(output)) < 22


def flip(file: Path) -> None:
    """One bit in the middle of the weights."""
    data = bytearray(file.read_bytes())
    (header_bytes,) = struct.unpack_from("<Q", data)
    data[(8 + header_bytes + len(data)) // 2] ^= 1
    file.write_bytes(data)


def test_one_bit_of_other_weights_is_refused(model: Path, prompts: Path, output: Path) -> None:
    stopped(model, prompts, output)
    file = shards(model)[-1]
    flip(file)
    rows = output.read_bytes()
    with pytest.raises(UnusableInput, match=rf"model {file} holds other weights .*xxh3_128 .* in the manifest, .* now"):
        job(model, prompts, output, engine_factory=never_made)
    assert output.read_bytes() == rows


def test_a_folder_that_was_copied_goes_on(model: Path, prompts: Path, output: Path) -> None:
    stopped(model, prompts, output)
    copy = shutil.copytree(model, model.with_name("copy"), copy_function=shutil.copyfile)
    for file in shards(copy):
        os.utime(file, ns=(0, 0))
    summary = job(copy, prompts, output)
    assert summary.num_done + summary.num_skipped >= 22
    assert any("weights files have changed times" in note for note in summary.notes)
    assert {file["mtime_ns"] for file in manifest(output)["weights"].values()} == {0}
    assert not any("other times" in note for note in job(copy, prompts, output).notes)


@pytest.mark.parametrize("touched", [True, False], ids=["touched", "as it was"])
def test_a_job_killed_before_it_knew_a_checksum_goes_on_with_the_same_file_alone(
    model: Path, prompts: Path, output: Path, touched: bool
) -> None:
    stopped(model, prompts, output)
    document = manifest(output)
    for file in document["weights"].values():
        file["xxh3_128"] = None
    output.with_name(output.name + ".manifest.json").write_text(json.dumps(document))
    if not touched:
        job(model, prompts, output)
        assert all(file["xxh3_128"] for file in manifest(output)["weights"].values())
        return
    file = shards(model)[0]
    os.utime(file, ns=(0, 0))
    with pytest.raises(
        UnusableInput, match=rf"{file} was written to since this job began .* before it knew the file's"
    ):
        job(model, prompts, output, engine_factory=never_made)


def test_weights_that_change_while_the_model_is_loaded_end_the_job(model: Path, prompts: Path, output: Path) -> None:
    engine = failing(RuntimeError("never"))

    def changing(*args: Any, **options: Any) -> Any:
        flip(shards(model)[0])
        return engine(*args, **options)

    with pytest.raises(JobError, match=r"safetensors was changed while the job ran"):
        job(model, prompts, output, engine_factory=changing)
    assert not output.exists()


@pytest.mark.parametrize(
    ("tier", "quantization"), [("none", {}), ("cpu", {}), ("nvme", {}), ("cpu", {"quantization": {"bits": 8}})]
)
def test_checksums_are_taken_of_what_the_engine_reads(tmp_path: Path, tier: str, quantization: dict[str, Any]) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=3)
    checkpoint = Checkpoint.open(folder)
    weights = Weights(checkpoint)
    checksums = weights.checksums
    assert checksums is not None
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": tier}}, "zinfer": quantization}
    engine = InferenceEngine(folder, resolve_settings(config, {"device": "cpu"}), checksums=checksums)
    try:
        streams = tier == "nvme"
        assert any(checksums.missing(file) for file in checkpoint.files) == streams
        engine(torch.tensor([[1, 2, 3]]))
    finally:
        engine.destroy()
    for file in checkpoint.files:
        assert checksums.missing(file) == []
        entries = sorted((entry.offset, entry.nbytes) for entry in checkpoint.tensors.values() if entry.file == file)
        data = file.read_bytes()
        digests = [xxhash.xxh3_128(data[begin : begin + nbytes]).digest() for begin, nbytes in entries]
        assert checksums.of_file(file) == xxhash.xxh3_128(b"".join(digests)).hexdigest()


def test_a_job_of_the_engine_reads_no_weights_for_their_checksums(
    model: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_missing = Weights._read_missing

    def read_nothing(self: Weights, file: Path) -> None:
        assert self._checksums.missing(file) == []
        read_missing(self, file)

    monkeypatch.setattr(Weights, "_read_missing", read_nothing)
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    job(model, prompts, output, engine_factory=None, config=config)
    assert all(file["xxh3_128"] for file in manifest(output)["weights"].values())
