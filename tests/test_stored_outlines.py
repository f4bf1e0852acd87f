"""Stored outlines of published models are those of their modules, and a plan of one imports neither torch nor
transformers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import ConfigError
from zinfer.model.built_outline import known_outline, outline_document
from zinfer.model.known_models import KNOWN_MODELS, find_known_model
from zinfer.model.outline import Outline, StoredModel, read_outline
from zinfer.weights.slab_matrix import SlabMatrix

QUICK: Final = ("llama-3.2-1b", "gpt-oss-20b", "glm-4.5-air", "deepseek-v3", "opt-30b")
"""Tied and untied heads, biases, experts, windows, latents, float32 weights, weights without a layer."""
NAMES: Final = [
    pytest.param(each.name, marks=[] if each.name in QUICK else [pytest.mark.slow])
    for each in KNOWN_MODELS.values()
    if each.config is not None
]
RULES: Final = (
    None,
    Quantization((QuantRule(bits=4, group_size=128),), exclude=("k_proj",)),
    Quantization((QuantRule(bits=8),), activations=True),
    Quantization((QuantRule(bits=8, is_float=True),)),
    KNOWN_MODELS["deepseek-v3"].stored,
    KNOWN_MODELS["gpt-oss-20b"].stored,
)
STALE: Final = "the stored outline is stale; write all again: python -m zinfer.model.built_outline"


def facts(outline: Outline) -> Iterator[dict[str, Any]]:
    """What planning reads of each block."""
    for each in outline.blocks:
        block = each.block
        yield {
            "index": block.index,
            "name": block.name,
            "use": (each.num_uses, each.is_looked_up, each.is_layer, block.encloses),
            "file": (block.file_bytes, block.has_gaps, block.covered_bytes),
            "is_converted": block.conversion is not None,
            "tensors": [
                (
                    *(tensor.name, str(tensor.dtype), tensor.shape, tensor.offset, tensor.nbytes, tensor.end),
                    *(tensor.dequantized_bytes, getattr(tensor, "format", None)),
                    isinstance(tensor, SlabMatrix) and tensor.quantizes_input,
                )
                for tensor in block.layout.tensors
            ],
        }


def quantized(outline: Outline, rules: Quantization | None) -> list[dict[str, Any]] | str:
    """The blocks' facts under these rules, or the error."""
    try:
        return list(facts(outline if rules is None else outline.quantized(rules)))
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_outline_is_that_of_the_modules(name: str) -> None:
    known = KNOWN_MODELS[name]
    built, stored = known_outline(known), StoredModel(known).outline()
    assert outline_document(built)["blocks"] == json.loads(json.dumps(stored.model._document["blocks"])), STALE
    assert built.spec == stored.spec, STALE
    assert str(built.dtype) == str(stored.dtype), STALE
    assert built.max_positions == stored.max_positions, STALE
    assert sorted(built.model.parameter_names) == sorted(stored.model.parameter_names), STALE
    for rules in RULES:
        assert quantized(stored, rules) == quantized(built, rules), rules


def test_a_model_in_another_dtype_or_format_is_the_same_model() -> None:
    torch = pytest.importorskip("torch")
    assert read_outline("llama-3.2-1b", torch.bfloat16).blocks == read_outline("llama-3.2-1b").blocks
    wide = read_outline("llama-3.2-1b", torch.float32)
    assert wide.dtype == torch.float32
    assert wide.nbytes > 1.9 * read_outline("llama-3.2-1b").nbytes
    variant = find_known_model("llama-3-70b-awq")
    assert variant is not None
    assert read_outline(variant.name).blocks == read_outline("llama-3-70b").blocks


PLANS: Final = (
    ("--model", "llama-3.1-8b", "--machine", "rtx4090"),
    ("--model", "deepseek-ai/DeepSeek-V3", "--machine", "h100-sxm", "--host-memory", "1TB", "--json"),
    ("--model", "llama-3-8b", "--machine", "rtx4090", "--rows", "64", "--new-tokens", "8"),
    ("--model", "llama-3-8b-awq", "--machine", "rtx4090", "--weights", "int4"),
    ("--model", "gpt-oss-20b", "--machine", "rtx4090", "--rows", "9"),
)


@pytest.mark.parametrize("arguments", PLANS, ids=lambda each: each[1])
def test_a_plan_of_a_published_model_imports_neither_torch_nor_transformers(arguments: tuple[str, ...]) -> None:
    """Nor numpy, unless the sizes of a job are searched, which takes longer without it."""
    heavy = {"torch", "transformers", "triton", *(() if "--rows" in arguments else ("numpy",))}
    script = (
        "import sys\n"
        "from zinfer.cli import main\n"
        f"sys.argv = ['zinfer', 'plan', *{arguments!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        f"loaded = {heavy!r} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
