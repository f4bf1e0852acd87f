"""A store that an engine writes for itself under `nvme_path`: the right bytes, once, and never anybody else's."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint, tiny_model
from jobs_support import letters_model, prompt_rows, write_rows
from packed_cache_support import engine_of, only, start
from store_support import blocks_of, contents, make_store
from transformers import AutoConfig, AutoModelForCausalLM

from zinfer.errors import CheckpointError, ConfigError, PlanError
from zinfer.jobs import run_job
from zinfer.store.files import LOCK_NAME
from zinfer.weights.native import MANIFEST_NAME

KEY = "zero_optimization.offload_param.nvme_path"
SECTIONS: dict[str, dict[str, object]] = {
    "int4": {"bits": 4, "group_size": 32, "symmetric": False},
    "fp8": {"bits": 8, "format": "fp8"},
}
INT4 = SECTIONS["int4"]
NUM_LAYERS = 4
NUM_BLOCKS = NUM_LAYERS + 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny", num_layers=NUM_LAYERS, tie=False)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    input_ids, attention_mask = left_padded(random_prompts(3, seed=5))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about the writing."""
    return [record.getMessage() for record in caplog.records if record.name == "zinfer.store.caches"]


@pytest.mark.parametrize("name", SECTIONS)
def test_it_is_the_store_that_zinfer_quantize_writes(
    model: Path,
    tmp_path: Path,
    batch: dict[str, torch.Tensor],
    device: str,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_store(model, tmp_path / "store", device, **SECTIONS[name])
    with engine_of(tmp_path / "store", None, device=device) as engine:
        expected = engine(**batch).logits
    nvme_path = tmp_path / "not" / "there yet"
    with engine_of(model, nvme_path, SECTIONS[name], device=device) as engine:
        assert torch.equal(engine(**batch).logits, expected)
        assert torch.equal(engine(**batch).logits, expected)
        assert engine.stats().blocks_by_home["DISK"] == NUM_LAYERS
        packed = sum(block["num_bytes"] for block in blocks_of(tmp_path / "store") if block["name"][-1].isdigit())
        assert 0 < engine.stats().disk_bytes_per_pass <= packed
        assert engine.settings.without_effect == ()
    assert contents(only(nvme_path)) == contents(tmp_path / "store")
    begun, finished = said(caplog)
    assert begun.startswith(f"{KEY}: {only(nvme_path)} is written once, ")
    assert f"{only(nvme_path)} is finished after" in finished
    assert f" bytes) in {NUM_BLOCKS} blocks, 0 of which were there already" in finished


def test_a_second_start_writes_nothing(
    model: Path, tmp_path: Path, batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(model, tmp_path / "nvme", INT4) as engine:
        expected = engine(**batch).logits
    store = only(tmp_path / "nvme")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "nvme", store, *store.iterdir())}
    data = contents(store)
    caplog.clear()
    with engine_of(model, tmp_path / "nvme", INT4) as engine:
        assert torch.equal(engine(**batch).logits, expected)
        assert engine.stats().blocks_by_home["DISK"] == NUM_LAYERS
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "nvme", store, *store.iterdir())} == before
    assert contents(store) == data
    assert said(caplog) == []


def test_what_changes_its_bytes_gets_a_folder_of_its_own(model: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint("llama", tmp_path / "others" / "tiny", num_layers=NUM_LAYERS, tie=False, seed=1)
    starts: list[tuple[Path, dict[str, object], dict[str, object]]] = [
        (model, INT4, {}),
        (model, INT4 | {"group_size": 64}, {}),
        (model, INT4 | {"exclude": ["layers.0"]}, {}),
        (model, INT4, {"dtype": "bf16"}),
        (other, INT4, {}),
    ]
    for number, (folder, section, options) in enumerate(starts, start=1):
        start(folder, tmp_path / "nvme", section, **options)
        assert len(list((tmp_path / "nvme").iterdir())) == number
    assert all(store.name.startswith("tiny-") for store in (tmp_path / "nvme").iterdir())
    start(model, tmp_path / "nvme", INT4, num_slots=3, max_out_tokens=50)
    start(Path(shutil.copytree(model, tmp_path / "copies" / "tiny")), tmp_path / "nvme", INT4)
    assert len(list((tmp_path / "nvme").iterdir())) == len(starts)


def test_a_model_of_the_hub_cache_gives_its_own_name(model: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--org--tiny"
    shutil.copytree(model, repo / "snapshots" / "abc123")
    start(repo, tmp_path / "nvme", INT4)
    assert only(tmp_path / "nvme").name.startswith("org--tiny-")


def test_a_module_on_the_meta_device_streams_from_it_too(
    model: Path, tmp_path: Path, batch: dict[str, torch.Tensor]
) -> None:
    with engine_of(model, None, INT4, home="cpu") as engine:
        expected = engine(**batch).logits
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    with engine_of(module, tmp_path / "nvme", INT4, checkpoint=str(model)) as engine:
        assert torch.equal(engine(**batch).logits, expected)
        assert engine.stats().blocks_by_home["DISK"] == NUM_LAYERS
    start(model, tmp_path / "nvme", INT4)
    assert only(tmp_path / "nvme").name.startswith("tiny-")


def test_a_link_to_nothing_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(
        ConfigError, match=r"output .*/link is a link to nothing; make what it points to, or give another"
    ):
        make_store(model, tmp_path / "link", **INT4)


@pytest.mark.parametrize(
    ("home", "section", "reason"),
    [("nvme", None, "read in place"), ("cpu", INT4, 'unless zero_optimization.offload_param.device is "nvme"')],
)
def test_where_nothing_is_written_the_key_is_listed(
    model: Path, tmp_path: Path, home: str, section: dict[str, object] | None, reason: str
) -> None:
    with engine_of(model, tmp_path / "nvme", section, home=home) as engine:
        (ignored,) = engine.settings.without_effect
    assert ignored.path == KEY
    assert reason in ignored.reason
    assert not (tmp_path / "nvme").exists()


def test_rules_that_fit_no_weight_write_nothing(model: Path, tmp_path: Path) -> None:
    start(model, tmp_path / "nvme", {"bits": 8, "include": ["mlp"], "exclude": ["mlp"]})
    assert not (tmp_path / "nvme").exists()


def test_a_store_that_is_given_streams_where_it_lies(model: Path, tmp_path: Path) -> None:
    make_store(model, tmp_path / "store", **INT4)
    start(tmp_path / "store", tmp_path / "nvme", INT4)
    assert not (tmp_path / "nvme").exists()


def test_without_the_key_the_refusal_names_it(model: Path) -> None:
    with pytest.raises(PlanError, match=rf"set {KEY}, .*`zinfer quantize`.*or set the device to \"cpu\""):
        start(model, None, INT4)
    with pytest.raises(PlanError, match=rf"set {KEY}, .*`zinfer quantize`"):
        start(tiny_model("llama", num_layers=2), None, INT4)


def test_activations_are_quantized_on_this_way_too(model: Path, batch: dict[str, torch.Tensor], tmp_path: Path) -> None:
    section: dict[str, object] = {"bits": 8, "activations": True}
    logits = {}
    for home, nvme_path in (("cpu", None), ("nvme", tmp_path / "nvme")):
        for asked in (section, {"bits": 8}):
            with engine_of(model, nvme_path, asked, home=home) as engine:
                logits[home, len(asked)] = engine(**batch).logits
    assert torch.equal(logits["nvme", 2], logits["cpu", 2])
    assert torch.equal(logits["nvme", 1], logits["cpu", 1])
    assert not torch.equal(logits["nvme", 2], logits["nvme", 1])
    only(tmp_path / "nvme")  # one store serves both
    make_store(model, tmp_path / "int4", bits=4)
    with pytest.raises(
        ConfigError, match=r"activations: model\.layers\.0\..* is stored as .*bits=4.* take symmetric INT8 or FP8"
    ):
        start(tmp_path / "int4", None, section)


def test_too_little_room_names_the_key(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    message = rf"^{KEY}: {tmp_path}/nvme/tiny-\w+: [\d,]+ bytes \(.*\) are needed there, 1,000 .* on another disk$"
    with pytest.raises(ConfigError, match=message) as caught:
        start(model, tmp_path / "nvme", INT4)
    assert "--" not in str(caught.value)
    assert [path.name for path in only(tmp_path / "nvme").iterdir()] == [LOCK_NAME]


def test_a_disk_that_fills_up_names_the_key_and_keeps_what_is_finished(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, written = os.write, [0]

    def full(descriptor: int, data: memoryview) -> int:
        written[0] += len(data)
        if written[0] > 120_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        message = rf"No space left on device; what is finished in {tmp_path}/nvme/tiny-\w+ is kept: .* another {KEY}: "
        with pytest.raises(OSError, match=message):
            start(model, tmp_path / "nvme", INT4)
    num_finished = len(blocks_of(only(tmp_path / "nvme")))
    assert 0 < num_finished < NUM_BLOCKS
    start(model, tmp_path / "nvme", INT4)
    assert said(caplog)[-1].endswith(f"{num_finished} of which were there already")
    make_store(model, tmp_path / "whole", **INT4)
    assert contents(only(tmp_path / "nvme")) == contents(tmp_path / "whole")


@pytest.mark.parametrize("inside", ["", "folder"])
def test_an_nvme_path_that_is_a_file_names_the_key(model: Path, tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=rf"^{KEY}: {tmp_path}/file.* cannot be made a folder .*; name one that can"):
        start(model, tmp_path / "file" / inside, INT4)
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_damaged_or_foreign_names_the_key(model: Path, tmp_path: Path) -> None:
    start(model, tmp_path / "nvme", INT4)
    store = only(tmp_path / "nvme")
    manifest = (store / MANIFEST_NAME).read_bytes()
    (store / MANIFEST_NAME).write_bytes(manifest[:-9])
    with pytest.raises(CheckpointError, match=rf"manifest is damaged; .* {KEY}: remove {store}, and the next start"):
        start(model, tmp_path / "nvme", INT4)
    (store / MANIFEST_NAME).write_bytes(manifest.replace(b'"format_version": 4', b'"format_version": 2'))
    with pytest.raises(CheckpointError, match=rf"format_version is 2, .* {KEY}: remove {store}, and the next start"):
        start(model, tmp_path / "nvme", INT4)
    (store / MANIFEST_NAME).unlink()
    with pytest.raises(ConfigError, match=rf"^{KEY}: {store} holds files that are no store's: .* folder as {KEY}$"):
        start(model, tmp_path / "nvme", INT4)


@pytest.mark.slow
def test_a_job_goes_on_where_its_weights_come_from_elsewhere(tmp_path: Path) -> None:
    """The job is one of the model that was named, wherever its blocks live."""
    model, prompts, output = letters_model(tmp_path / "model"), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_rows(prompts, prompt_rows(22))
    options = {"batch_size": 4, "max_new_tokens": 8, "device": "cpu"}
    config = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "zinfer": {"quantization": INT4}}
    run_job(model, prompts, output, config=config, **options)
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:9]))
    config["zero_optimization"] = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}}
    summary = run_job(model, prompts, output, config=config, **options)
    assert (summary.num_skipped, summary.num_done) == (9, 22)
    assert summary.stats is not None
    assert summary.stats.blocks_by_home["DISK"] == 2
    assert output.read_bytes() == whole
