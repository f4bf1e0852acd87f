"""All causal language models of transformers, as small as their configs become: how each runs.

``python tests/walked_models.py`` writes what it finds to `zinfer/model/family_walk.json`, from which come the table of
`docs/families.md` and what `zinfer families` says; it takes minutes.
"""

import copy
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from ragged_models import make_loud
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import zinfer
from zinfer.batching.family_check import check_family
from zinfer.errors import ConfigError, ZinferError
from zinfer.model.build import build_on_meta
from zinfer.model.families import TOGETHER, WALK_NAME
from zinfer.model.miniature import shrink
from zinfer.model.padding import Sharing, find_row_sharing
from zinfer.model.stage import ShorterModel

MODEL_TYPES: Final = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
_PROMPT_LENS: Final = (2, 30, 11)
_NUM_NEW: Final = 4
_MOST_WEIGHTS: Final = 30_000_000
_FEW_LAYERS: Final = 4

_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
_BY_KIND: Final = {"full_attention": _ROPE, "sliding_attention": _ROPE}

# What small models of a type need beside the sizes that all have.
_OWN: Final[dict[str, dict[str, Any]]] = {
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "cohere_compass_text": {"rope_parameters": _BY_KIND},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "nemotron": {"num_key_value_heads": 2},
}


_SHARING: Final = {
    Sharing.ANY: "",
    Sharing.EQUAL: "; rows of equal lengths share batches",
    Sharing.ALONE: "; each row is computed alone",
}


def small_model(model_type: str) -> PreTrainedModel:
    """The class of a type on the meta device, with its usual options, small sizes and a few layers.

    Raises:
        Exception: transformers builds none.
    """
    config = AutoConfig.for_model(model_type)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    shrink(config)
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True  # as checkpoints of BERT's decoders state
    for name, value in _OWN.get(model_type, {}).items():
        *path, member = name.split(".")
        setattr(reduce(getattr, path, config), member, value)
    model = build_on_meta(model_class, config)
    try:
        ShorterModel.of_each_kind(model, num_more=1).apply()
    except (ConfigError, NotImplementedError):
        return model
    return build_on_meta(type(model), copy.deepcopy(model.config))


def describe(model_type: str) -> tuple[str, str]:
    """The class of a type, and how it runs: `TOGETHER`, with a limit if it has one, "padded", or "refused"."""
    try:
        model = small_model(model_type)
    except Exception as error:  # configs refuse in any way
        return "", f"refused: transformers builds no small one ({_brief(error)})"
    name = type(model).__name__
    if sum(each.numel() for each in model.parameters()) > _MOST_WEIGHTS:
        return name, "refused: a model of images or sound too, whose text side is not taken apart yet"
    try:
        found = check_family(model)
    except ConfigError as error:
        why = str(error).partition(": ")[2].partition("; ")[0]
        return name, f"padded: {why}{_SHARING[find_row_sharing(model, 0, generates=True).sharing]}"
    limit = f", up to {found.max_tokens} tokens: {found.limited_by}" if found.max_tokens else ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            check_tokens(model, Path(folder))
        except ZinferError as error:
            return name, f"refused: {_brief(error).replace(folder, 'the folder')}"
    return name, TOGETHER + limit


def check_tokens(meta: PreTrainedModel, folder: Path) -> None:
    """An `LLM` completes several prompts at once as transformers' `generate` completes each alone.

    Raises:
        AssertionError: it does not.
        ZinferError: it does not load the model.
    """
    config = copy.deepcopy(meta.config)
    config.dtype = torch.float32
    model: PreTrainedModel = type(meta)._from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompts = [[3 + (11 * place + 5 * num) % 90 for place in range(num)] for num in _PROMPT_LENS]
    wanted: list[list[int]] = []
    for seed in range(5):  # until the texts say something
        torch.manual_seed(seed)
        make_loud(model)
        wanted = [_continued(model, prompt) for prompt in prompts]
        if len({token for tokens in wanted for token in tokens}) > 2:
            break
    model.save_pretrained(folder)
    with zinfer.LLM(folder, {"zinfer": {"device": "cpu", "tokens_per_pass": 16, "kv_page_size": 8}}) as llm:
        rows = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = llm.generate(rows, max_new_tokens=_NUM_NEW, ignore_eos=True)
    assert [each.error for each in found] == [None] * len(prompts)
    assert [list(each.token_ids) for each in found] == wanted


def _continued(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": _NUM_NEW, "do_sample": False, "pad_token_id": 0}
    found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def _brief(error: Exception) -> str:
    return f"{' '.join(f'{type(error).__name__}: {error}'.split()):.160}"


def walk(model_types: Iterable[str]) -> Mapping[str, tuple[str, str]]:
    """`describe` of each type, told on stderr."""
    found = {}
    for model_type in model_types:
        try:
            found[model_type] = describe(model_type)
        except AssertionError as error:
            found[model_type] = "", f"WRONG: {error!s:.200}"
        print(model_type, *found[model_type], file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # measure all of them
    stored = Path(__file__).parent.parent / "zinfer" / "model" / WALK_NAME
    types = dict(sorted(walk(MODEL_TYPES).items()))
    stored.write_text(json.dumps({"transformers": transformers.__version__, "types": types}, indent=0) + "\n")
