"""Embeddings of sentence-transformers checkpoints: pooling, dense layers, normalization, prompts and lengths."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from checkpoints import VOCAB_SIZE
from jobs_support import letters_tokenizer
from safetensors.torch import save_file
from serve_support import serving
from torch import nn
from transformers import BertConfig, BertModel

from zinfer.errors import CheckpointError, ConfigError
from zinfer.jobs import run_job
from zinfer.jobs.embedding_head import EmbeddingHead
from zinfer.jobs.request import Pooling

WIDTH: Final = 32
ROWS: Final = ([5, 9, 23, 77, 40], [8], [11, 12, 13, 14, 15, 16, 17])
PACKAGE: Final = "sentence_transformers.models."
POOLINGS: Final[dict[str, dict[str, Any]]] = {
    "mean": {"pooling_mode_mean_tokens": True},
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "max": {"pooling_mode_max_tokens": True},
    "sqrt": {"pooling_mode_mean_sqrt_len_tokens": True},
    "weighted": {"pooling_mode_weightedmean_tokens": True},
    "last": {"pooling_mode_lasttoken": True},
    "named": {"pooling_mode": "lasttoken"},
    "joined": {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
}


def pooled(kind: str, hidden_TW: torch.Tensor) -> torch.Tensor:
    """What sentence-transformers computes of one text's token vectors."""
    places = torch.arange(1, len(hidden_TW) + 1)[:, None]
    return {
        "mean": hidden_TW.mean(dim=0),
        "cls": hidden_TW[0],
        "max": hidden_TW.amax(dim=0),
        "sqrt": hidden_TW.sum(dim=0) / len(hidden_TW) ** 0.5,
        "weighted": (hidden_TW * places).sum(dim=0) / places.sum(),
        "last": hidden_TW[-1],
        "named": hidden_TW[-1],
        "joined": torch.cat([hidden_TW[0], hidden_TW.mean(dim=0), hidden_TW[-1]]),
    }[kind]


def checkpoint(folder: Path, pooling: dict[str, Any], *more: str) -> BertModel:
    """A tiny encoder with a Pooling, and further modules in folders of their names."""
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=VOCAB_SIZE, initializer_range=0.3, **shape)).eval()
    model.save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH, **pooling})
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *((each, each.partition("_")[2]) for each in more)]
    write(
        folder / "modules.json",
        [{"idx": n, "name": str(n), "path": path, "type": PACKAGE + kind} for n, (path, kind) in enumerate(kinds)],
    )
    return model


def dense(folder: Path, *, as_safetensors: bool) -> nn.Module:
    torch.manual_seed(1)
    linear = nn.Linear(WIDTH, 8)
    write(
        folder / "config.json",
        {"in_features": WIDTH, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"},
    )
    weights = {f"linear.{name}": value for name, value in linear.state_dict().items()}
    if as_safetensors:
        save_file(weights, folder / "model.safetensors")
    else:
        torch.save(weights, folder / "pytorch_model.bin")
    return nn.Sequential(linear, nn.Tanh())


def write(path: Path, document: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))


def embedded(folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    source, output = folder.parent / "in.jsonl", folder.parent / "out.jsonl"
    source.write_text("".join(json.dumps({"id": number} | row) + "\n" for number, row in enumerate(rows)))
    run_job(folder, source, output, task="embed", device="cpu", restart=True, **options)
    return sorted((json.loads(line) for line in output.read_text().splitlines()), key=lambda row: row["id"])


@torch.no_grad()
def hidden(model: BertModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_is_the_checkpoints(kind: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", POOLINGS[kind])
    found = embedded(tmp_path / "m", [{"prompt_token_ids": row} for row in ROWS])
    for ids, row in zip(ROWS, found, strict=True):
        torch.testing.assert_close(
            torch.tensor(row["embedding"]), pooled(kind, hidden(model, ids)), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("as_safetensors", [True, False])
def test_dense_and_normalize_follow_in_their_order(as_safetensors: bool, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", POOLINGS["cls"], "2_Dense", "3_Normalize")
    layer = dense(tmp_path / "m" / "2_Dense", as_safetensors=as_safetensors)
    for pooling, kind in (("auto", "cls"), ("mean", "mean")):
        (row,) = embedded(tmp_path / "m", [{"prompt_token_ids": ROWS[0]}], pooling=pooling)
        wanted = nn.functional.normalize(layer(pooled(kind, hidden(model, ROWS[0]))), dim=0)
        torch.testing.assert_close(torch.tensor(row["embedding"]), wanted, rtol=1e-4, atol=1e-5)


def test_prompts_and_the_longest_text_count_in_jobs_and_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    model = checkpoint(folder, POOLINGS["mean"], "2_Normalize")
    prompts = {"prompts": {"query": "ask ", "document": ""}, "default_prompt_name": "query"}
    write(folder / "config_sentence_transformers.json", prompts)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 12})
    texts = {name: letters_tokenizer()(text + "hello").input_ids for name, text in prompts["prompts"].items()}  # type: ignore[attr-defined]
    wanted = {name: nn.functional.normalize(hidden(model, ids).mean(dim=0), dim=0) for name, ids in texts.items()}
    for name, of_text in ((None, "query"), ("query", "query"), ("document", "document")):
        short, long = embedded(folder, [{"prompt": "hello"}, {"prompt": "hello" * 3}], prompt_name=name)
        torch.testing.assert_close(torch.tensor(short["embedding"]), wanted[of_text], rtol=1e-4, atol=1e-5)
        assert "12 (max_seq_length of sentence_bert_config.json); shorten it" in long["error"]
    with pytest.raises(ConfigError, match="prompt_name is 'passage', but the model's prompts are 'query', 'document'"):
        embedded(folder, [{"prompt": "hello"}], prompt_name="passage")
    with serving(folder, tmp_path, "--task", "embed") as server:
        client = server.client()
        for extra, name in (({}, "query"), ({"prompt_name": "document"}, "document")):
            (found,) = client.embeddings.create(model="m", input="hello", extra_body=extra).data
            torch.testing.assert_close(torch.tensor(found.embedding), wanted[name], rtol=1e-4, atol=1e-5)
        with pytest.raises(Exception, match="the model's prompts are 'query', 'document'"):
            client.embeddings.create(model="m", input="hello", extra_body={"prompt_name": "passage"})


def test_what_is_used_is_said_and_the_command_overrides_it(tmp_path: Path) -> None:
    checkpoint(tmp_path, POOLINGS["cls"], "2_Normalize")
    assert str(EmbeddingHead.read(tmp_path)) == "cls, then unit length"
    assert EmbeddingHead.read(tmp_path).source == "as modules.json says"
    assert str(EmbeddingHead.read(tmp_path, Pooling.LAST)) == "lasttoken, then unit length"
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "attention"})
    assert str(EmbeddingHead.read(tmp_path, Pooling.CLS)) == "cls, then unit length"
    (tmp_path / "modules.json").unlink()
    assert str(EmbeddingHead.read(tmp_path)) == "mean, then unit length"


def bad_dense(folder: Path) -> None:
    checkpoint(folder, POOLINGS["cls"], "2_Dense")
    write(folder / "2_Dense" / "config.json", {"in_features": 4, "out_features": 8, "activation_function": "os.system"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: checkpoint(folder, {}, "2_LSTM"), "its pooling is none"),
        (lambda folder: checkpoint(folder, POOLINGS["cls"], "2_LSTM"), "names a module 'LSTM', which is not supported"),
        (lambda folder: checkpoint(folder, POOLINGS["cls"], "2_Dense"), "2_Dense.*config.json: is missing"),
        (bad_dense, "activation_function is one of"),
        (lambda folder: write(folder / "modules.json", {}), "is no list of modules"),
        (lambda folder: write(folder / "modules.json", [{"type": 3}]), "module 0 states no type and path"),
        (lambda folder: write(folder / "modules.json", [{"type": "x.Pooling", "path": "../a"}]), "not a file inside"),
        (lambda folder: write(folder / "modules.json", [{"type": "x.CLIPModel", "path": ""}]), "begins with CLIPModel"),
    ],
)
def test_what_is_not_known_is_refused_in_a_sentence(damage: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    damage(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message):
        EmbeddingHead.read(tmp_path / "m")
