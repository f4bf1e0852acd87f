"""Which files and tensors a checkpoint counts: transformers' order, the index's word, each way they can disagree."""

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_model, write_safetensors
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from zinfer.errors import CheckpointError
from zinfer.model.build import build_meta_model
from zinfer.model.matching import match_weights
from zinfer.nvme.file_identity import FileIdentity
from zinfer.weights import Checkpoint

PART_1, PART_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_scale": Infinity}')
    return tmp_path


def write(folder: Path, file_name: str, *names: str, value: float = 1.0) -> Path:
    (folder / file_name).parent.mkdir(exist_ok=True)
    return write_safetensors(folder / file_name, {name: torch.full((4,), value) for name in names})


def write_index(folder: Path, weight_map: object, file_name: str = INDEX) -> None:
    (folder / file_name).write_text(json.dumps({"metadata": {"total_size": 3.5e1}, "weight_map": weight_map}))


def sharded(folder: Path) -> Path:
    write(folder, PART_1, "a", "b")
    write(folder, PART_2, "c")
    write_index(folder, {"a": PART_1, "b": PART_1, "c": PART_2})
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_single_file(folder: Path) -> None:
    path = write(folder, "model.safetensors", "a", "b")
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.folder == folder
    assert checkpoint.config_path == folder / "config.json"
    assert checkpoint.files == {path: FileIdentity.of(path)}
    assert sum(entry.nbytes for entry in checkpoint.tensors.values()) == 32
    assert {name: entry.file for name, entry in checkpoint.tensors.items()} == {"a": path, "b": path}


def test_index(folder: Path) -> None:
    checkpoint = Checkpoint.open(sharded(folder))
    assert tuple(checkpoint.files) == (folder / PART_1, folder / PART_2)
    places = {name: entry.file.name for name, entry in checkpoint.tensors.items()}
    assert places == {"a": PART_1, "b": PART_1, "c": PART_2}
    assert sum(entry.nbytes for entry in checkpoint.tensors.values()) == 48


def test_the_single_file_goes_before_the_index_as_in_transformers(folder: Path) -> None:
    write(sharded(folder), "model.safetensors", "z")
    assert Checkpoint.open(folder).tensors.keys() == {"z"}


def test_every_tensor_of_a_shard_counts_as_in_transformers(folder: Path) -> None:
    sharded(folder)
    write(folder, PART_1, "a", "b", "c", "spare")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors.keys() == {"a", "b", "c", "spare"}
    assert checkpoint.unnamed == {"spare"}
    assert checkpoint.tensors["c"].file.name == PART_2


def test_a_file_that_the_index_does_not_name_is_not_opened(folder: Path) -> None:
    (sharded(folder) / "junk.safetensors").write_bytes(b"junk")
    assert Checkpoint.open(folder).tensors.keys() == {"a", "b", "c"}


def test_config_may_name_the_weights_itself_as_in_transformers(folder: Path) -> None:
    write(sharded(folder), "other.safetensors", "o")
    write_index(folder, {"c": PART_2}, "other.safetensors.index.json")
    for name, tensors in (("other.safetensors", {"o"}), ("other.safetensors.index.json", {"c"})):
        (folder / "config.json").write_text(json.dumps({"transformers_weights": name}))
        assert Checkpoint.open(folder).tensors.keys() == tensors


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("absent.safetensors", "names 'absent.safetensors', which is not in the folder: download it"),
        ("pytorch_model.bin", "is 'pytorch_model.bin', not a safetensors file or its index: correct it"),
        ("../x.safetensors", "names '../x.safetensors', not a file inside the checkpoint's folder"),
        (7, "is 7, not a safetensors file or its index: correct it"),
    ],
)
def test_config_names_unusable_weights(folder: Path, name: object, what: str) -> None:
    (sharded(folder) / "config.json").write_text(json.dumps({"transformers_weights": name}))
    message = refusal(folder)
    assert message.startswith(f"{folder / 'config.json'}: transformers_weights {what}")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"a": ', "at byte 6 not valid JSON: Expecting value: download it again"),
        (b"\xff", "at byte 0 not valid UTF-8: download it again"),
        (b"[]", "list instead of an object {...}: download it again"),
        (b"[" * 100_000, "nested too deeply: download it again"),
    ],
)
def test_damaged_config(folder: Path, content: bytes, what: str) -> None:
    (sharded(folder) / "config.json").write_bytes(content)
    assert what in refusal(folder)


def test_missing_shard(folder: Path) -> None:
    (sharded(folder) / PART_1).unlink()
    message = refusal(folder)
    assert message == f"{folder / INDEX}: missing shard {PART_1} (2 tensors are in it): download it into {folder}"


def test_a_shard_that_is_a_dangling_link_is_missing(folder: Path) -> None:
    (sharded(folder) / PART_2).unlink()
    (folder / PART_2).symlink_to("gone")
    assert f"missing shard {PART_2} (1 tensors are in it)" in refusal(folder)


def test_what_the_index_says_of_other_shards_than_hold_it_does_not_matter(folder: Path) -> None:
    write_index(sharded(folder), {"a": PART_1, "b": PART_2, "c": PART_1, "nowhere": PART_1})
    checkpoint = Checkpoint.open(folder)
    places = {name: entry.file.name for name, entry in checkpoint.tensors.items()}
    assert places == {"a": PART_1, "b": PART_1, "c": PART_2}
    assert checkpoint.absent == {"nowhere": PART_1}


@pytest.mark.parametrize("change", ["unneeded", "unnamed", "elsewhere", "spare", "missing"])
def test_a_model_gets_its_weights_despite_its_index_as_in_transformers(change: str, folder: Path) -> None:
    tiny_checkpoint("llama", folder)
    document = json.loads((folder / INDEX).read_text())
    places, norm = document["weight_map"], "model.norm.weight"
    last = places[norm]
    first = min(set(places.values()) - {last})
    if change == "unneeded":
        places["mtp.fc.weight"] = last
    elif change == "unnamed":
        del places[norm]
    elif change == "elsewhere":
        places[norm] = first
    else:
        held = load_file(folder / last)
        moved = held.pop(norm) if change == "missing" else held[norm].clone()
        save_file(held | ({"mtp.fc.weight": moved} if change == "spare" else {}), folder / last, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps(document))
    checkpoint = Checkpoint.open(folder)
    model = build_meta_model(checkpoint)
    if change == "missing":
        with pytest.raises(
            CheckpointError, match=f"1 weights are missing.*index says that {last} has {norm}, which no"
        ):
            match_weights(model, checkpoint)
        return
    assert match_weights(model, checkpoint).keys() >= dict(model.named_parameters()).keys()
    loaded = LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model.norm.weight, tiny_model("llama").model.norm.weight)


def test_a_damaged_shard_names_itself(folder: Path) -> None:
    path = sharded(folder) / PART_2
    path.write_bytes(path.read_bytes()[:-5])
    assert re.search(
        rf"{PART_2}: tensor 'c' at byte \d+ is not wholly in the file: 5 bytes are missing", refusal(folder)
    )


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "at byte 1 not valid JSON: Expecting property name enclosed in double quotes: the index is corrupt"),
        ("[]", "list instead of an object {...}: the index is corrupted, download it again"),
        ('"text"', "str instead of an object {...}"),
        ("true", "bool instead of an object {...}"),
        ("17", "int instead of an object {...}"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "the name 'a' occurs twice in one object"),
        ("{}", "no weight_map of tensor names to file names: download the index again"),
        ('{"weight_map": []}', "no weight_map of tensor names to file names"),
        ('{"weight_map": {}}', "no weight_map of tensor names to file names"),
        ('{"weight_map": {"a": 1}}', "weight_map['a'] is not a file name: download the index again"),
    ],
)
def test_damaged_index(folder: Path, content: str, what: str) -> None:
    (sharded(folder) / INDEX).write_text(content)
    message = refusal(folder)
    assert message.startswith(f"{folder / INDEX}:")
    assert what in message


@pytest.mark.parametrize(
    "file_name",
    ["../x.safetensors", "sub/../../x", "/etc/passwd", "C:\\x", "C:x", "..\\x", "\\\\host\\x", "", ".", "a\0b"],
)
def test_index_that_leads_out_of_the_folder(folder: Path, file_name: str) -> None:
    write_index(sharded(folder), {"a": file_name})
    message = refusal(folder)
    assert f"weight_map['a'] names {file_name!r}, not a file inside the checkpoint's folder" in message
    assert "do not trust this copy" in message


def test_index_may_name_files_in_a_subfolder_and_links(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = write(tmp_path_factory.mktemp("blobs"), "blob", "b")
    write(folder, "sub/x.safetensors", "a")
    (folder / "y.safetensors").symlink_to(elsewhere)
    write_index(folder, {"a": "sub/x.safetensors", "b": "y.safetensors"})
    checkpoint = Checkpoint.open(folder)
    assert tuple(checkpoint.files) == (folder / "sub/x.safetensors", folder / "y.safetensors")


def test_without_index_the_files_are_united(folder: Path) -> None:
    write(folder, "one.safetensors", "a")
    write(folder, "two.safetensors", "b")
    checkpoint = Checkpoint.open(folder)
    assert [path.name for path in checkpoint.files] == ["one.safetensors", "two.safetensors"]
    assert checkpoint.tensors.keys() == {"a", "b"}


def test_without_index_model_files_go_before_others(folder: Path) -> None:
    write(folder, PART_1, "a")
    write(folder, PART_2, "b")
    write(folder, "consolidated.safetensors", "a", "b")
    write(folder, "adapter_model.safetensors", "a")
    assert [path.name for path in Checkpoint.open(folder).files] == [PART_1, PART_2]


def test_without_index_a_tensor_in_two_files(folder: Path) -> None:
    write(folder, "one.safetensors", "a", "b")
    write(folder, "two.safetensors", "b")
    message = refusal(folder)
    assert message.startswith(f"{folder / 'two.safetensors'}: tensor 'b' is in one.safetensors too, and no index says")
    assert f"keep the files of one model in the folder, or add its {INDEX}" in message


@pytest.mark.parametrize(
    "file_names",
    [
        [PART_1, PART_2, "model.fp16.safetensors"],
        [PART_1, PART_2, "model-00001-of-00001.safetensors"],
        ["consolidated-00001-of-00001.safetensors", "other.safetensors"],
    ],
)
def test_without_index_several_models(folder: Path, file_names: list[str]) -> None:
    for index, file_name in enumerate(file_names):
        write(folder, file_name, str(index))
    message = refusal(folder)
    assert "the files of several models, and no index to say which counts" in message
    assert ", ".join(sorted(file_names)) in message
    assert "keep those of one model" in message


def test_without_index_a_gap_in_the_numbers(folder: Path) -> None:
    write(folder, "model-00001-of-00004.safetensors", "a")
    write(folder, "model-00003-of-00004.safetensors", "b")
    assert refusal(folder) == f"{folder}: missing shard 2, 4 of 4: download it"
    (folder / "model-00003-of-00004.safetensors").unlink()
    (folder / "model-00001-of-00004.safetensors").rename(folder / "model-1-of-99999999999.safetensors")
    assert "missing shard 2, 3, 4, 5, 6, 7, 8, 9 and " in refusal(folder)


def test_only_an_adapter(folder: Path) -> None:
    write(folder, "adapter_model.safetensors", "a")
    assert "only an adapter, adapter_model.safetensors: merge it into its base model" in refusal(folder)


def test_only_dangling_links(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("gone")
    assert "its *.safetensors are links to files that are gone: download the model again" in refusal(folder)


def test_no_tensor(folder: Path) -> None:
    write(folder, "model.safetensors")
    assert "the files hold no tensor: download the weights again" in refusal(folder)


def test_unreadable_config_and_index_keep_the_errno(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(folder)
    read_bytes = Path.read_bytes
    for name in ("config.json", INDEX):

        def fail(path: Path, name: str = name) -> bytes:
            if path.name == name:
                raise OSError(5, "Input/output error", str(path))
            return read_bytes(path)

        monkeypatch.setattr(Path, "read_bytes", fail)
        assert f"{folder / name}: cannot be read: Input/output error (errno 5)" in refusal(folder)


def test_index_with_a_name_too_long_for_the_file_system(folder: Path) -> None:
    write_index(sharded(folder), {"a": "x" * 300})
    assert re.search(r"xxx: cannot be read: File name too long \(errno 36\)", refusal(folder))


def test_fingerprint_tells_models_apart_and_not_places(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = Checkpoint.open(sharded(folder)).fingerprint
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert Checkpoint.open(folder).fingerprint == first
    copy = tmp_path_factory.mktemp("copy")
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert Checkpoint.open(sharded(copy)).fingerprint == first
    write(copy, PART_2, "c", value=2.0)
    assert Checkpoint.open(copy).fingerprint == first, "weights are not read"

    fingerprints = {first}
    write_index(write(copy, PART_2, "d").parent, {"a": PART_1, "b": PART_1, "d": PART_2})
    fingerprints.add(Checkpoint.open(copy).fingerprint)
    (copy / PART_2).rename(copy / "renamed.safetensors")
    write_index(copy, {"a": PART_1, "b": PART_1, "d": "renamed.safetensors"})
    fingerprints.add(Checkpoint.open(copy).fingerprint)
    (folder / "config.json").write_text('{"model_type": "opt"}')
    fingerprints.add(Checkpoint.open(folder).fingerprint)
    assert len(fingerprints) == 4
