"""What `zinfer quantize` refuses, by name and with a remedy, leaving everything as it was."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import tiny_checkpoint
from safetensors.torch import load_file, save_file
from store_support import begin_store, contents, make_store
from transformers import LlamaConfig, LlamaForCausalLM

from zinfer.config import Settings
from zinfer.errors import CheckpointError, ConfigError
from zinfer.store.files import LOCK_NAME, locked
from zinfer.store.writing import write_store
from zinfer.weights.checkpoint import weights_sample
from zinfer.weights.native import MANIFEST_NAME

NUM_BLOCKS = 9
SECTION: dict[str, object] = {"bits": 4, "group_size": 32, "symmetric": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, embedding, norm and head."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), num_layers=6, tie=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", ["begun", "finished"])
def test_another_model_or_other_settings_are_refused_by_name(model: Path, tmp_path: Path, state: str) -> None:
    store = tmp_path / "store"
    if state == "begun":
        begin_store(model, store, 3, **SECTION)
    else:
        make_store(model, store, **SECTION)
    before = contents(store)
    with pytest.raises(ConfigError, match=r"settings\.rules\[0\]\.bits: 4 in the store, 8 now") as caught:
        make_store(model, store, bits=8, group_size=32, symmetric=False)
    assert "source" not in str(caught.value)
    assert "give another --output" in str(caught.value)
    with pytest.raises(ConfigError, match=r'settings\.search: "none" in the store, "clip" now'):
        make_store(model, store, search="clip", **SECTION)
    tuned = tmp_path / "tuned"
    shutil.copytree(model, tuned)
    shard = next(tuned.glob("model-00001*.safetensors"))
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"source\.weights_sample: .* in the store, .* now") as caught:
        make_store(tuned, store, **SECTION)
    assert f'source.name: "{model.name}" in the store, "tuned" now' in str(caught.value)
    assert contents(store) == before


def test_a_change_between_the_samples_of_a_file_is_seen(tmp_path: Path) -> None:
    model = tmp_path / "model"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 128}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(model)
    make_store(model, tmp_path / "store", **SECTION)
    shard = model / "model.safetensors"
    data = bytearray(shard.read_bytes())
    before = weights_sample([shard])
    gap = len(data) // 15 // 2  # the middle between two samples
    data[-gap - 64 : -gap] = bytes(64)
    shard.write_bytes(data)
    assert weights_sample([shard]) == before, "the test's own: it must miss all samples"
    with pytest.raises(ConfigError, match=r"source\.weights_written: .* in the store, .* now"):
        make_store(model, tmp_path / "store", **SECTION)


def test_the_place_of_a_model_is_no_part_of_what_it_is(model: Path, tmp_path: Path) -> None:
    make_store(model, tmp_path / "store", **SECTION)
    shutil.copytree(model, tmp_path / "elsewhere")
    assert make_store(tmp_path / "elsewhere", tmp_path / "store", **SECTION).num_skipped == NUM_BLOCKS


def test_foreign_files_are_left_as_they_are(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"store holds files that are no store's: notes\.txt; .*new or empty folder"):
        make_store(model, store)
    assert [path.name for path in store.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match=r"notes\.txt is not a folder; give another --output"):
        make_store(model, store / "notes.txt")
    with pytest.raises(ConfigError, match=r"holds files that are no store's: config\.json"):
        make_store(model, model)


def test_a_store_is_not_quantized_again(model: Path, tmp_path: Path) -> None:
    make_store(model, tmp_path / "store")
    begin_store(model, tmp_path / "begun", 3)
    for store in ("store", "begun"):
        with pytest.raises(CheckpointError, match=rf"{store}: already quantized.*name the model that it was made of"):
            make_store(tmp_path / store, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_too_little_room_is_said_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(model, tmp_path / "whole", **SECTION)
    whole = contents(tmp_path / "whole")
    needed = sum(len(data) for name, data in whole.items() if name != MANIFEST_NAME)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
        message = rf"store: {needed:,} bytes \(.*\) are needed there, {needed - 1:,} \(.*\) are free; make room"
        with pytest.raises(ConfigError, match=message):
            make_store(model, tmp_path / "store", **SECTION)
        assert [path.name for path in (tmp_path / "store").iterdir()] == [LOCK_NAME]
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
        make_store(model, tmp_path / "store", **SECTION)
    assert contents(tmp_path / "store") == whole


def test_a_second_writer_is_refused(model: Path, tmp_path: Path) -> None:
    with (
        locked(tmp_path / "store"),
        pytest.raises(ConfigError, match=r"store is being written by another process; wait for it or end it"),
    ):
        make_store(model, tmp_path / "store")
    assert [path.name for path in (tmp_path / "store").iterdir()] == [LOCK_NAME]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], r"Invalid JSON.* line \d+ .*the manifest is damaged"),
        (lambda text: text.replace('"format_version": 4', '"format_version": 2'), r"format_version is 2, this zinfer"),
        (lambda text: "", r"Invalid JSON"),
    ],
)
def test_a_damaged_manifest_of_a_start_is_refused(
    model: Path, tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    begin_store(model, tmp_path / "store", 3)
    manifest = tmp_path / "store" / MANIFEST_NAME
    manifest.write_text(change(manifest.read_text()))
    with pytest.raises(CheckpointError, match=message):
        make_store(model, tmp_path / "store")


def test_a_start_of_a_former_version_is_refused(model: Path, tmp_path: Path) -> None:
    begin_store(model, tmp_path / "store", 3)
    (tmp_path / "store" / MANIFEST_NAME).rename(tmp_path / "store" / "zinfer_store.partial.jsonl")
    with pytest.raises(ConfigError, match=r"no store's: .*zinfer_store\.partial\.jsonl; .*give a new or empty folder"):
        make_store(model, tmp_path / "store")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"group_size": 48}, r"group_size = 48 does not divide the 128 columns of model\.layers\.0\."),
        ({"include": ["mpl"]}, r"the pattern 'mpl' occurs in no parameter"),
        ({"include": ["mlp"], "exclude": ["mlp"]}, r"quantize no weight of this model; correct include and exclude"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    model: Path, tmp_path: Path, section: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_store(model, tmp_path / "store", **section)
    with pytest.raises(ConfigError, match=r"asks for no quantized weights; state zinfer\.quantization\.bits"):
        write_store(model, tmp_path / "store", Settings(device="cpu"))
    assert not (tmp_path / "store").exists()
