"""JSON files as configuration: every way in which one can be unreadable is told, with the file's name."""

import json
import re
from pathlib import Path

import pytest

from zinfer.config import resolve_settings
from zinfer.errors import ConfigError


def _refusal(file: Path) -> str:
    with pytest.raises(ConfigError, match=f"^{re.escape(str(file))}: ") as refused:
        resolve_settings(file)
    return str(refused.value).removeprefix(f"{file}: ")


def test_a_file_is_read_by_text_and_by_path(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    assert resolve_settings(file) == resolve_settings(str(file))
    assert resolve_settings(file).offload.device == "cpu"


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(b'\xef\xbb\xbf{"dtype": "fp32"}')
    assert str(resolve_settings(file).dtype) == "torch.float32"


def test_a_missing_file(tmp_path: Path) -> None:
    assert _refusal(tmp_path / "none.json") == (
        "cannot be read (No such file or directory); config must be a dict or the path of a JSON file"
    )


def test_a_folder(tmp_path: Path) -> None:
    assert _refusal(tmp_path) == ("cannot be read (Is a directory); config must be a dict or the path of a JSON file")


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    assert _refusal(tmp_path / ("x" * 5000)).startswith("cannot be read (File name too long); ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"dtype":\n  "fp16",}', "not JSON: Expecting property name enclosed in double quotes: line 2 column "),
        ('{"dtype": // no\n 1}', "not JSON: Expecting value: line 1 column 11"),
        ("", "not JSON: Expecting value: line 1 column 1"),
        ('["dtype"]', "expected one JSON object {...} at the top, got list"),
        ("3", "expected one JSON object {...} at the top, got int"),
        ('{"dtype": "fp16", "dtype": "fp16"}', "dtype: occurs twice in one object; remove one"),
        ('{"aio": {"a": 1, "queue_depth": 2, "queue_depth": 2}}', "aio.queue_depth: occurs twice in one object"),
        ('{"optimizer": {"params": [{}, {"lr": 1, "lr": 2}]}}', "optimizer.params[1].lr: occurs twice in one object"),
        ('{"aio": {"block_size": NaN}}', "aio.block_size: NaN and Infinity are not JSON; write a finite number"),
        ('{"optimizer": {"params": {"lr": -Infinity}}}', "optimizer.params.lr: NaN and Infinity are not JSON"),
        ('{"gradient_clipping": 1e999}', "gradient_clipping: NaN and Infinity are not JSON"),
        ("[" * 200_000, "not JSON: maximum recursion depth exceeded"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "not JSON: "),
        ('{"aio": {"queue_dpth": 1}}', "unknown key aio.queue_dpth; did you mean aio.queue_depth?"),
        ('{"aio": {"queue_depth": "one"}}', 'aio.queue_depth = "one": expected a whole number of at least 1'),
        ('{"ep_group": 2}', "ep_group = 2: expected a process group of torch.distributed that this process is in"),
        (
            '{"zero": {"leaf_module": {"names": [1]}}}',
            "zero.leaf_module.names = [1]: expected a name, or a list of names",
        ),
        ('{"zero": {}, "zero_optimization": {}}', "zero and zero_optimization are the same key"),
    ],
)
def test_what_is_wrong_in_a_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    assert _refusal(file).startswith(message)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(b'{"dtype": "\xff"}')
    assert _refusal(file) == ("not JSON: 'utf-8' codec can't decode byte 0xff in position 11: invalid start byte")


def test_a_file_and_keyword_arguments_that_differ(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"fp16": {"enabled": true}, "zinfer": {"num_slots": 3}}')
    assert resolve_settings(file, {"num_slots": 3}).num_slots == 3
    with pytest.raises(
        ConfigError, match=r"zinfer\.num_slots = 3 \(.*ds\.json\) and num_slots = 4 \(keyword arguments\)"
    ):
        resolve_settings(file, {"num_slots": 4})
    with pytest.raises(ConfigError, match=r'dtype = "bf16" \(keyword.*contradicts fp16\.enabled = true \(.*ds\.json\)'):
        resolve_settings(file, {"dtype": "bf16"})


@pytest.mark.parametrize("config", [[], 3, [("dtype", "fp16")], b"ds.json"])
def test_other_kinds_of_config_are_refused(config: object) -> None:
    with pytest.raises(ConfigError, match=r"^config: expected a dict or the path of a JSON file, got "):
        resolve_settings(config)  # type: ignore[arg-type]
