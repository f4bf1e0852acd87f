"""The demo checkpoint: its size, tokenizer and prompts, its answers, how it was trained, and the quickstart."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo"
MODEL = DEMO / "model"
MAX_CHECKPOINT_BYTES = 8 * 1024 * 1024
BATCH_SIZE = 50


def read_prompts(path: Path = DEMO / "prompts.jsonl") -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def operands(prompt: str) -> tuple[int, int]:
    left, right = prompt.removesuffix("=").split("+")
    return int(left), int(right)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def train_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo", ROOT / "scripts" / "train_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_demo"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_checkpoint_is_small_and_sharded() -> None:
    index = json.loads((MODEL / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = sorted(MODEL.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [shard.name for shard in shards]
    assert len(shards) >= 2
    assert sum(shard.stat().st_size for shard in shards) <= MAX_CHECKPOINT_BYTES


def test_checkpoint_has_enough_layers_and_a_tied_head() -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] >= 8
    assert config["tie_word_embeddings"] is True
    index = json.loads((MODEL / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert "lm_head.weight" not in index["weight_map"]


def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("120+456=576")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 1 + len("120+456=576")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "120+456=576"
    assert tokenizer("120 + 456 =")["input_ids"] == tokenizer("120+456=")["input_ids"]
    assert tokenizer("x")["input_ids"] == [tokenizer.bos_token_id, tokenizer.unk_token_id]


def test_tokenizer_pads_on_the_left(tokenizer: PreTrainedTokenizerBase) -> None:
    batch = tokenizer(["1+2=", "123+456="], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][0] == [0] * 4 + [1] * 5
    assert batch["input_ids"][0][:5] == [tokenizer.pad_token_id] * 4 + [tokenizer.bos_token_id]


def test_chat_template_takes_the_last_user_message(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "40+2="},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == tokenizer("40+2=")["input_ids"]


def test_prompts_are_distinct_and_of_mixed_lengths() -> None:
    prompts = read_prompts()
    assert len(prompts) == 200
    assert len({row["id"] for row in prompts}) == 200
    assert len({row["prompt"] for row in prompts}) == 200
    assert len({len(row["prompt"]) for row in prompts}) >= 4


def test_prompts_are_what_the_script_keeps_out_of_training(train_demo: ModuleType) -> None:
    held_out = train_demo.draw_held_out(train_demo.NUM_PROMPTS, torch.Generator().manual_seed(0))
    assert [operands(row["prompt"]) for row in read_prompts()] == held_out


def test_training_examples_leave_the_held_out_pairs_out(train_demo: ModuleType) -> None:
    num_drawn = 20_000
    held_out = [(7, right) for right in range(10)]
    examples = train_demo.Examples(held_out, torch.Generator().manual_seed(1))
    ids, labels = examples.draw(num_drawn)
    seen = {tuple(row) for row in ids.tolist()}
    assert not any(tuple(examples.encode(*pair)[0]) in seen for pair in held_out)
    assert any(tuple(examples.encode(8, right)[0]) in seen for right in range(10))
    assert ids.shape == labels.shape == (len(ids), train_demo.NUM_EXAMPLE_TOKENS)
    assert 0 < num_drawn - len(ids) < 100


def test_training_examples_learn_the_answer_only(train_demo: ModuleType) -> None:
    ids, labels = train_demo.Examples.encode(7, 95)
    vocabulary = train_demo.VOCABULARY
    answer = [vocabulary[token] for token in ("1", "0", "2", train_demo.EOS)]
    assert ids[:6] == [vocabulary[token] for token in (train_demo.BOS, *"7+95=")]
    assert ids[6:10] == answer
    assert labels[6:10] == answer
    assert {*labels[:6], *labels[10:]} == {train_demo.IGNORED}


def test_answers_are_right_with_plain_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert model.dtype == torch.float32
    prompts = [row["prompt"] for row in read_prompts()]
    num_right = 0
    for start in range(0, len(prompts), BATCH_SIZE):
        part = prompts[start : start + BATCH_SIZE]
        batch = tokenizer(part, return_tensors="pt", padding=True)
        tokens = model.generate(**batch, max_new_tokens=8)
        texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        num_right += sum(text == str(sum(operands(prompt))) for text, prompt in zip(texts, part, strict=True))
    assert num_right >= 0.98 * len(prompts)


@pytest.mark.slow
def test_training_runs_end_to_end_and_repeats(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "train_demo.py")
    options = ["--steps", "2", "--batch-size", "16", "--threads", "1", "--seed", "5"]
    runs = [
        subprocess.Popen(
            [sys.executable, script, *options, "--out", str(tmp_path / name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("first", "second")
    ]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert "right on the 200 prompts" in outputs[0]
    first, second = (read_weights(tmp_path / name / "model") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert read_prompts(tmp_path / "first" / "prompts.jsonl") != read_prompts()
    assert AutoTokenizer.from_pretrained(tmp_path / "first" / "model").padding_side == "left"


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) >= 2
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


Rows = list[dict[str, object]]


def right_rows() -> Rows:
    return [{"id": row["id"], "text": str(sum(operands(row["prompt"])))} for row in read_prompts()]


def check(path: Path, rows: Rows) -> subprocess.CompletedProcess[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_demo.py"), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


def with_wrong(rows: Rows, count: int) -> Rows:
    return [{"id": row["id"], "text": "no"} if number < count else row for number, row in enumerate(rows)]


@pytest.mark.parametrize(("num_wrong", "returncode"), [(0, 0), (4, 0), (5, 1)])
def test_check_counts_right_answers(tmp_path: Path, num_wrong: int, returncode: int) -> None:
    done = check(tmp_path / "out.jsonl", with_wrong(right_rows(), num_wrong))
    num_right = 200 - num_wrong
    assert done.stdout == f"right answers: {num_right} of 200 ({num_right / 200:.1%})\n"
    assert done.returncode == returncode


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: rows[1:], "1 rows missing: sum-000"),
        (lambda rows: [*rows, rows[3]], "1 rows repeated: sum-003"),
        (lambda rows: [*rows, {"id": "sum-999", "error": "none"}], "1 rows not among the prompts: sum-999"),
    ],
    ids=["missing", "repeated", "unknown"],
)
def test_check_refuses_missing_and_repeated_rows(tmp_path: Path, spoil: Callable[[Rows], Rows], words: str) -> None:
    done = check(tmp_path / "out.jsonl", spoil(right_rows()))
    assert words in done.stderr
    assert done.returncode == 1


def test_check_names_the_line_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps(right_rows()[0]) + '\n{"id": "sum-0', encoding="utf-8")
    script = str(ROOT / "scripts" / "check_demo.py")
    done = subprocess.run([sys.executable, script, str(path)], capture_output=True, text=True, check=False)
    assert f"{path}, line 2: not JSON" in done.stderr
    assert done.returncode == 1


STUB = """#!/usr/bin/env bash
if [[ $1 == -m && ($2 == pip || $2 == venv) ]]; then echo "this is $2"; else exec {python} "$@"; fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy with an environment that takes no minutes: its pip and venv only say that they were called."""
    for name in ("scripts", "pyproject.toml", "constraints.txt"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(STUB.format(python=sys.executable))
    (programs / "zinfer").write_text(f'#!/bin/sh\nexec {sys.executable} -m zinfer "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def quickstart(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(checkout / ".venv" / "bin" / "python"), "PYTHONPATH": str(ROOT)}
    command = [str(checkout / "scripts" / "quickstart"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_quickstart_shows_answers_before_its_summary(checkout: Path) -> None:
    done = quickstart(checkout, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    start = lines.index("Some of the answers in out/demo.jsonl:") + 1
    shown = [line.partition(" -> ") for line in lines[start : start + 3]]
    assert [str(sum(operands(prompt))) for prompt, _, _ in shown] == [answer for _, _, answer in shown]
    assert lines[start + 3].strip() == "zinfer run"
    assert lines[-1].startswith("right answers: ")
    assert re.search(r"predicted +│ \S+ m?s for 6 passes; they took \S+ m?s +│", done.stdout), "as many as predicted"
    assert "weights: 10 blocks in memory\n" in done.stderr


def test_the_quickstart_ends_as_its_job_does(checkout: Path) -> None:
    done = quickstart(checkout, "--device", "cpu", "--max-new-tokens", "0")
    assert done.returncode == 2
    assert "max-new-tokens" in done.stderr
    assert "->" not in done.stdout
