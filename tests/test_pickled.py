"""Checkpoints of `torch.save` are read in place, and nothing that a file asks for is run."""

import builtins
import io
import json
import os
import pickle
import random
import re
import shlex
import shutil
import struct
import sys
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint, tiny_mixtral
from engines import loaded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading_support import DISK, Tensors, batch, check_logits, eager_logits, llama
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from zinfer import LLM
from zinfer.errors import CheckpointError
from zinfer.model.outline import read_outline
from zinfer.weights import Checkpoint, Header
from zinfer.weights.pickled import MAX_PICKLE_BYTES, read_pickled

__all__ = ["batch", "llama"]  # fixtures

PICKLED = "pytorch_model.bin"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn]


def pickled(source: Path, target: Path, *, files: int = 1, wrapper: str | None = None) -> Path:
    """A copy of a checkpoint whose weights are in files of `torch.save`, with an index if there are several."""
    target.mkdir()
    for path in source.glob("*.json"):
        if "index" not in path.name:
            shutil.copy(path, target)
    tensors = {
        name: tensor for path in sorted(source.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    if files == 1:
        torch.save(tensors if wrapper is None else {"epoch": 3, wrapper: tensors}, target / PICKLED)
        return target
    weight_map = {name: f"pytorch_model-{at % files + 1:05}-of-{files:05}.bin" for at, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        torch.save(OrderedDict((name, tensors[name]) for name in tensors if weight_map[name] == file), target / file)
    (target / f"{PICKLED}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


@pytest.mark.parametrize(("files", "wrapper"), [(1, None), (3, None), (1, "state_dict"), (1, "module")])
def test_logits_and_bytes_equal_those_of_safetensors(
    llama: Path, tmp_path: Path, batch: Tensors, files: int, wrapper: str | None
) -> None:
    folder = pickled(llama, tmp_path / "pickled", files=files, wrapper=wrapper)
    check_logits(folder, eager_logits(llama, batch), batch)
    bytes_moved = []
    for each in (llama, folder):
        with loaded(each, DISK) as engine:
            engine(**batch)
            bytes_moved.append((engine.stats().bytes_to_device, engine.stats().disk_bytes_per_pass))
    assert bytes_moved[0] == bytes_moved[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2", "llama"])
def test_a_tie_that_is_saved_under_both_names_moves_once(family: str, tmp_path: Path, batch: Tensors) -> None:
    source = tiny_checkpoint(family, tmp_path / "model", num_layers=2, shards=1, tie=True)
    folder = pickled(source, tmp_path / "pickled")
    tensors = torch.load(folder / PICKLED, weights_only=True)
    embedding = next(name for name in tensors if re.search(r"(embed_tokens|wte)\.weight", name))
    torch.save(tensors | {"lm_head.weight": tensors[embedding]}, folder / PICKLED)
    check_logits(folder, eager_logits(source, batch), batch)
    assert read_outline(folder).nbytes == read_outline(source).nbytes


def test_experts_and_names_are_converted_as_those_of_safetensors(tmp_path: Path, batch: Tensors) -> None:
    tiny_mixtral().save_pretrained(tmp_path / "model")
    folder = pickled(tmp_path / "model", tmp_path / "pickled", files=2)
    check_logits(folder, eager_logits(tmp_path / "model", batch), batch, DISK)


def test_continuous_batches(llama: Path, tmp_path: Path) -> None:
    prompts = [{"prompt_token_ids": tokens} for tokens in random_prompts(3)]
    tokens = []
    for folder in (llama, pickled(llama, tmp_path / "pickled", files=2)):
        with LLM(folder, device="cpu", kv_cache_memory="2MB") as llm:
            tokens.append([each.token_ids for each in llm.generate(prompts, max_new_tokens=6)])
    assert tokens[0] == tokens[1]


def test_which_files_count(llama: Path, tmp_path: Path) -> None:
    folder = pickled(llama, tmp_path / "pickled", files=2)
    parts = set(folder.glob("*.bin"))
    torch.save({"step": 3}, folder / "training_args.bin")
    assert set(Checkpoint.open(folder).files) == parts
    (folder / f"{PICKLED}.index.json").unlink()
    assert set(Checkpoint.open(folder).files) == parts, "numbered files without their index"
    shutil.copy(llama / "model.safetensors", folder / "adapter_model.safetensors")
    assert set(Checkpoint.open(folder).files) == parts, "an adapter is no model"
    torch.save({"a": torch.ones(1)}, folder / PICKLED)
    assert set(Checkpoint.open(folder).files) == {folder / PICKLED}
    shutil.copy(llama / "model.safetensors", folder / "other.safetensors")
    assert set(Checkpoint.open(folder).files) == {folder / "other.safetensors"}, "safetensors go first"
    for path in (*parts, folder / PICKLED, folder / "other.safetensors", folder / "adapter_model.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no safetensors, only training_args\.bin"):
        Checkpoint.open(folder)


def test_a_file_of_model_states_as_deepspeed_saves_it(llama: Path, tmp_path: Path, batch: Tensors) -> None:
    tensors = load_file(llama / "model.safetensors")
    states = {
        "module": OrderedDict(tensors),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, tensor.shape) for name, tensor in tensors.items())],
        "sparse_tensor_module_names": set(),
        "shared_params": {},
        "global_steps": 7,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.18.0",
    }
    torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
    listed = {"type": "ds_model", "checkpoints": ["mp_rank_00_model_states.pt"], "version": 1.0}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama))
    with loaded(model, DISK, checkpoint=listed, base_dir=tmp_path) as engine:
        assert torch.equal(engine(**batch).logits, eager_logits(llama, batch))


@st.composite
def saved(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors as training code keeps them: parameters, scalars, slices of a storage, and two of one storage."""
    tensors: dict[str, torch.Tensor] = {}
    for index in range(draw(st.integers(1, 5))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 4), max_size=3))
        numel = torch.Size(shape).numel()
        pattern = torch.arange(1, 1 + dtype.itemsize * (numel + 6), dtype=torch.uint8) + 17 * index
        storage = (pattern % 2 if dtype is torch.bool else pattern).view(dtype)
        begin = draw(st.integers(0, 6))
        tensor = storage[begin : begin + numel].view(shape)
        if dtype.is_floating_point and draw(st.booleans()):
            tensor = nn.Parameter(tensor)
        tensors[f"layers.{index}.weight"] = tensor
        if draw(st.booleans()):
            tensors[f"layers.{index}.tied"] = storage[:3]
    return tensors


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_equal_those_that_torch_loads(tmp_path: Path) -> None:
    path = tmp_path / PICKLED

    @given(tensors=saved(), protocol=st.sampled_from([2, 4, 5]))
    def check(tensors: dict[str, torch.Tensor], protocol: int) -> None:
        torch.save(tensors, path, pickle_protocol=protocol)
        expected = torch.load(path, weights_only=False)
        header = read_pickled(path)
        assert header.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            entry = header.tensors[name]
            assert (entry.dtype, entry.shape, entry.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
            assert raw(entry.read()) == raw(tensor)

    check()


def test_state_dicts_of_modules_with_buffers_and_versions(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.save(module.state_dict(), tmp_path / PICKLED)
    for name, entry in read_pickled(tmp_path / PICKLED).tensors.items():
        assert torch.equal(entry.read(), module.state_dict()[name])


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
        read_pickled(path)
    message = str(caught.value)
    assert len(message) < 2000
    return message


class Calls:
    """Pickled, it calls a function of the file's choice."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.reduced


def write_archive(path: Path, data: bytes, **records: bytes) -> Path:
    """An archive as `torch.save` writes it, with a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", data)
        for name, content in records.items():
            archive.writestr(f"model/data/{name.removeprefix('_')}", content)
    return path


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (builtins.eval, r"(builtins|__builtin__)\.eval"),
        (builtins.getattr, r"(builtins|__builtin__)\.getattr"),
        (torch.load, r"torch\.serialization\.load"),
        (torch.hub.load, r"torch\.hub\.load"),
        (Namespace, "argparse.Namespace"),
    ],
)
def test_what_a_file_asks_for_is_named_and_not_run(
    tmp_path: Path, function: Callable[..., Any], name: str, protocol: int
) -> None:
    written = tmp_path / "written"
    code = f"open({str(written)!r}, 'w')" if function is builtins.eval else f"touch {shlex.quote(str(written))}"
    payload = {"a": torch.ones(2), "b": Calls(function, code)}
    for data in (payload, payload["b"], {"state_dict": payload}):
        torch.save(data, tmp_path / PICKLED, pickle_protocol=protocol)
        message = refusal(tmp_path / PICKLED)
        assert re.search(
            rf"byte \d+: its pickle (asks for '{name}'|has the instruction \w+): nothing of it was run", message
        )
    assert not written.exists()


GLOBAL = b"ctorch._utils\n_rebuild_tensor_v2\n"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR.", "asks for 'os.system'"),
        (b"\x80\x02(cos\nsystem\nX\x02\x00\x00\x00lso.", "asks for 'os.system'"),
        (b"\x80\x02(X\x02\x00\x00\x00lsios\nsystem\n.", "has the instruction INST"),
        (b"\x80\x02" + GLOBAL + b")\x81.", "has the instruction NEWOBJ"),
        (b"\x80\x02" + GLOBAL + b"}(X\x01\x00\x00\x00aK\x01ub.", "sets attributes of a global"),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", "sets attributes of a global"),
        (b"\x80\x02ccollections\nOrderedDict\n]\x85R.", "calls collections.OrderedDict with 1 arguments"),
        (b"\x80\x02ctorch\nFloatStorage\nK\x01\x85R.", "calls torch.FloatStorage with 1 arguments"),
        (b"\x80\x02X\x01\x00\x00\x00a)R.", "calls a str with 0 arguments"),
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93.", "asks for 'os.system'"),
        (b"\x80\x02\x82\x01.", "has the instruction EXT1"),
        (b"\x80\x02}K\x07.", "holds a int, no dict of tensors"),
        (b"\x80\x02}(K\x01K\x02u.", "holds '1' (a int), and not one dict of tensors under state_dict"),
        (
            b"\x80\x02}(X\x01\x00\x00\x00aK\x02X\x01\x00\x00\x00b]u.",
            "holds 'a' (a int), 'b' (a list), and not one dict",
        ),
        (b"\x80\x02" + b")" + b"\x85" * 200_000 + b".", "holds a tuple, no dict of tensors"),
        (b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.", "keys that are no texts or integers"),
        (b"\x80\x02" + b"(" * 1000 + b".", "its pickle is damaged (nested too deeply)"),
        (b"\x80\x02]r\xff\xff\xff\xff.", "holds a list, no dict of tensors"),
        (b"\x80\x02X\xff\xff\xff\x7fa.", "its pickle is damaged (expected 2147483647 bytes"),
        (b"\x80\x02h\x07.", "its pickle is damaged"),
        (b"\x80\x02R.", "its pickle is damaged (the stack is empty"),
        (b"\x80\x02}", "its pickle is damaged (pickle exhausted before seeing STOP"),
        (b"\x80\x02(X\x07\x00\x00\x00storageK\x00K\x00K\x00K\x00tQ.", "a persistent id that is no storage"),
        (b"", "its pickle is damaged (pickle exhausted before seeing STOP"),
    ],
)
def test_pickles_that_torch_does_not_write(tmp_path: Path, data: bytes, what: str) -> None:
    assert what in refusal(write_archive(tmp_path / PICKLED, data))


def test_the_pickle_has_a_limit(tmp_path: Path) -> None:
    path = write_archive(tmp_path / PICKLED, b"\x80\x02" + b"0" * MAX_PICKLE_BYTES)
    assert f"has {MAX_PICKLE_BYTES + 2} bytes, more than {MAX_PICKLE_BYTES}" in refusal(path)


def described(*, key: str = "0", numel: int = 6, rest: tuple[object, ...] = (0, (2, 3), (3, 1), False, ())) -> bytes:
    """A pickle of one tensor "a"."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", torch.FloatStorage, key, "cpu", numel) if isinstance(value, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"a": Calls(torch._utils._rebuild_tensor_v2, Storage(), *rest)})
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        ({"key": "1"}, "the archive has no record 'model/data/1'"),
        ({"numel": 7}, r"its storage at byte \d+ has 24 bytes, but its pickle states 28"),
        ({"rest": (1, (2, 3), (3, 1), False, ())}, r"ends at byte 28 of its storage, which has 24 at byte \d+"),
        ({"rest": (0, (2, 4), (4, 1), False, ())}, r"shape \[2, 4\] ends at byte 32 of its storage"),
        ({"rest": (0, (2**40, 2**40), (2**40, 1), False, ())}, "overflows 64 bits"),
        ({"rest": (0, (2, -3), (3, 1), False, ())}, "no natural numbers of 64 bits"),
        ({"rest": (True, (2, 3), (3, 1), False, ())}, "no natural numbers of 64 bits"),
        ({"rest": (0, (2, 3), (3,), False, ())}, "its shape has 2 dimensions, its strides 1"),
        ({"rest": (0, (1,) * 65, (1,) * 65, False, ())}, "its shape has 65 dimensions, its strides 65"),
        ({"rest": (0, [2, 3], (3, 1), False, ())}, "its description is malformed"),
        ({"rest": (0, (3, 2), (1, 3), False, ())}, r"transposed.* \(strides \[1, 3\] of shape \[3, 2\]\), and cannot"),
        ({"rest": (0, (2, 6), (0, 1), False, ())}, r"expanded .*\(strides \[0, 1\]"),
        ({"rest": (0, (2, 3), (3, 1), False, (), {"neg": True})}, "transposed, expanded or negated"),
    ],
)
def test_tensors_that_their_storage_does_not_hold(tmp_path: Path, tensor: dict[str, Any], what: str) -> None:
    path = write_archive(tmp_path / PICKLED, described(**tensor), _0=bytes(24))
    assert re.search(f"tensor 'a'.*{what}", refusal(path))
    write_archive(path, described(), _0=bytes(24))
    assert read_pickled(path).tensors["a"].shape == (2, 3)


def run_remedy(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what `save it again` says, in this process."""
    command = shlex.split(message.split("again, in place: ")[1])
    assert command[:2] == ["python", "-c"]
    monkeypatch.setattr(sys, "argv", ["-c", *command[3:]])
    exec(command[2], {})


@pytest.mark.parametrize("wrapper", [None, "model"])
@pytest.mark.parametrize("form", ["legacy", "transposed", "expanded", "compressed"])
def test_the_remedy_works(tmp_path: Path, form: str, wrapper: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "it's a model.bin"
    value = {"transposed": torch.arange(6.0).view(2, 3).t(), "expanded": torch.arange(3.0).expand(2, 3)}.get(form)
    tensors = {"a": torch.arange(4) if value is None else value, "b": torch.ones(2)}
    saved = tensors if wrapper is None else {wrapper: tensors}
    torch.save(saved, path, _use_new_zipfile_serialization=form != "legacy")
    if form == "compressed":
        with zipfile.ZipFile(path) as archive:
            contents = {info.filename: archive.read(info) for info in archive.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
    run_remedy(refusal(path), monkeypatch)
    for name, entry in read_pickled(path).tensors.items():
        assert torch.equal(entry.read(), tensors[name])


def archived(path: Path, order: Callable[[list[str]], list[str]] = list) -> Path:
    """An archive of three storages, written by the standard library."""
    torch.save({name: torch.arange(6.0) + at for at, name in enumerate("abc")}, path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if "serialization_id" not in name}
    with zipfile.ZipFile(path, "w") as archive:
        for name in order(list(contents)):
            with archive.open(name, "w", force_zip64=name.endswith("1")) as record:
                record.write(contents[name])
    return path


def central(file: bytes, record: str) -> int:
    """Where the directory's entry of a record begins."""
    return file.index(record.encode(), file.index(b"PK\x01\x02")) - 46


def local(file: bytes, record: str) -> int:
    return file.index(record.encode()) - 30


def put(at: Callable[[bytes, str], int], offset: int, form: str, value: int) -> Callable[[bytes], bytes]:
    """Overwrite a field in one of the two headers of the first storage."""

    def change(file: bytes) -> bytes:
        changed = bytearray(file)
        struct.pack_into(form, changed, at(file, "model/data/0") + offset, value)
        return bytes(changed)

    return change


def sized(num_bytes: int) -> Callable[[bytes], bytes]:
    return lambda file: put(central, 20, "<I", num_bytes)(put(central, 24, "<I", num_bytes)(file))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (put(central, 8, "<H", 1), r"the record 'model/data/0' at byte \d+ is encrypted"),
        (put(central, 10, "<H", 8), r"at byte \d+ is compressed, and cannot be read in place: save it again"),
        (put(central, 20, "<I", 20), r"at byte \d+ is compressed"),
        (put(local, 8, "<H", 8), "has a local header that differs from the directory"),
        (put(local, 6, "<H", 1), "has a local header that differs from the directory"),
        (put(local, 30, "<B", 78), "has a local header that differs from the directory: .*'Nodel/data/0'"),
        (put(local, 26, "<H", 11), "has a local header that differs from the directory"),
        (
            put(local, 28, "<H", 9),
            r"the record 'model/data/0' at byte \d+ ends at byte \d+, and the next one begins at",
        ),
        (put(local, 0, "<B", 0), r"begins with b'\\x00K\\x03\\x04' instead of a zip's local header"),
        (put(central, 42, "<I", 2**31), "begins outside the file: the file is cut short"),
        (put(central, 42, "<I", 0), "has a local header that differs from the directory"),
        (sized(25), r"ends at byte \d+, and the next one begins at byte \d+"),
        (sized(2**31), r"ends at byte \d+, and the next one begins at byte \d+"),
        (sized(20), r"tensor 'a': its storage at byte \d+ has 20 bytes, but its pickle states 24"),
        (put(central, 46, "<B", 78), "has a local header that differs from the directory"),
        (
            lambda file: file.replace(b"little", b"big\0\0\0"),
            r"the byte order at byte \d+ is not little: save it again",
        ),
        (lambda file: file.replace(b"model/", b"nodel/", 1), "has a local header that differs"),
        (lambda file: file.replace(b"data.pkl", b"data.pkk"), "a zip with 0 data.pkl instead of one"),
        (lambda file: file.replace(b"FloatStorage", b"HloatStorage"), "the checksum of 'model/data.pkl' at byte"),
        (lambda file: file[:-30], "its zip directory is damaged"),
        (lambda file: file[: len(file) // 2], "its zip directory is damaged .*: download it again"),
        (lambda file: bytes(4) + file[4:], r"not a file of torch\.save: it begins with b'\\x00"),
        (lambda file: b"", "not a file of torch.save: it begins with b''"),
        (lambda file: b"version https://git-lfs", "a Git LFS pointer, not the weights: run `git lfs pull`"),
    ],
)
def test_damaged_archives(tmp_path: Path, change: Callable[[bytes], bytes], what: str) -> None:
    path = archived(tmp_path / "model.bin")
    file = path.read_bytes()
    path.write_bytes(change(file))
    assert path.read_bytes() != file
    assert re.search(what, refusal(path))


def test_records_in_any_order_and_beyond_four_gigabytes(tmp_path: Path) -> None:
    path = archived(tmp_path / "model.bin", lambda names: sorted(names, reverse=True))
    content = path.read_bytes()
    for at, name in enumerate("abc"):
        assert torch.equal(read_pickled(path).tensors[name].read(), torch.arange(6.0) + at)
    with zipfile.ZipFile(io.BytesIO(content)) as archive, (tmp_path / "large.bin").open("wb") as file:
        file.write(content[:4])
        file.seek(5 << 30)  # a hole, which takes no room
        with zipfile.ZipFile(file, "w") as large:
            for name in archive.namelist():
                large.writestr(name, archive.read(name))
    entry = read_pickled(tmp_path / "large.bin").tensors["c"]
    assert entry.offset > 5 << 30
    assert torch.equal(entry.read(), torch.arange(6.0) + 2)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_record_that_is_there_twice(tmp_path: Path) -> None:
    path = archived(tmp_path / "model.bin", lambda names: [*names, "model/data/0"])
    assert "the record 'model/data/0' is in the archive twice" in refusal(path)


def test_scripted_modules_and_pipes(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_archive(tmp_path / "scripted.pt", b"\x80\x02}."), "a") as archive:
        archive.writestr("model/code/__torch__.py", "def forward(self): ...", zipfile.ZIP_DEFLATED)
        archive.writestr("model/constants.pkl", b"\x80\x02).")
    assert "a TorchScript archive, which holds code" in refusal(tmp_path / "scripted.pt")
    os.mkfifo(tmp_path / PICKLED)
    assert "not a regular file" in refusal(tmp_path / PICKLED)


def outcome(path: Path) -> Header | None:
    try:
        return read_pickled(path)
    except CheckpointError as error:
        message = str(error)
    assert message.startswith(f"{path}: ")
    assert len(message) < 2000
    return None


def test_damage_is_refused_or_changes_no_place(tmp_path: Path) -> None:
    """Checksums cover what describes the tensors; their values are not read, as those of safetensors are not."""
    path, ends = tmp_path / "model.bin", {"refused": 0, "read": 0}
    archived(path)
    content, expected = path.read_bytes(), read_pickled(path)

    @settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(rng=st.randoms(use_true_random=False), is_cut=st.integers(0, 5))
    def check(rng: random.Random, is_cut: int) -> None:
        damaged = bytearray(content if is_cut else content[: rng.randrange(len(content))])
        for _ in range(rng.randint(0 if not is_cut else 1, 4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        header = outcome(path)
        ends["read" if header else "refused"] += 1
        if header is not None:
            assert header.tensors == expected.tensors

    check()
    assert ends["refused"] >= 100
    assert ends["read"] >= 5


def test_a_damaged_pickle_with_a_true_checksum_stays_within_its_storages(tmp_path: Path) -> None:
    path, ends = tmp_path / "model.bin", {"refused": 0, "read": 0}
    torch.save({name: torch.arange(6.0) for name in "abc"} | {"d": torch.ones(2).bfloat16()}, path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        info, data = archive.infolist()[0], archive.read("model/data.pkl")
    begin = content.index(data)

    @settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(rng=st.randoms(use_true_random=False))
    def check(rng: random.Random) -> None:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(data))] = rng.choice((rng.randrange(256), *b"().RbQtuq}]X\x85\x86\x87"))
        damaged = bytearray(content)
        damaged[begin : begin + len(data)] = changed
        entry = bytes(damaged).index(b"PK\x01\x02")
        struct.pack_into("<I", damaged, entry + 16, zlib.crc32(changed))
        path.write_bytes(damaged)
        header = outcome(path)
        ends["read" if header else "refused"] += 1
        for each in header.tensors.values() if header is not None else ():
            assert begin + len(data) <= each.offset <= each.offset + each.nbytes <= len(content)

    assert info.filename == "model/data.pkl"
    check()
    assert ends["refused"] >= 100
    assert ends["read"] >= 5
