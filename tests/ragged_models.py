"""Tiny random causal models of every family that runs in ragged batches, and prompts that they compute in chunks."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from checkpoints import MATRIX_STD, VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import zinfer
from zinfer.batching.ragged import BatchBuilder, RaggedBatch
from zinfer.batching.runner import PassRunner, with_few_counts
from zinfer.kv_cache.base import PageCache
from zinfer.kv_cache.device import KVCache
from zinfer.kv_cache.host import HostedKVCache
from zinfer.model.spec import ModelSpec
from zinfer.scheduling.schedule import Chunk, Chunks
from zinfer.scheduling.sequence import Sequence as TokenSequence

_WINDOW: Final = {"sliding_window": 16}
_HEADS: Final = {"head_dim": 16}
_UNTIED: Final = {"tie_word_embeddings": False}  # tied, the last token is repeated for ever
_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: Final = _EXPERTS | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_OLD_FALCON: Final = {"new_decoder_architecture": False, "alibi": False}
_ALONE: Final = {"num_key_value_heads": None}

# What a family needs beside the shape that all have; a name may be followed by a variant.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "bloom": {"n_head": 4, "n_layer": 2} | _ALONE,
    "cohere": {},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon-multi_query": _OLD_FALCON | {"multi_query": True},
    "falcon-alibi": _OLD_FALCON | {"multi_query": False, "alibi": True, "parallel_attn": False},
    "gemma": _HEADS,
    "gemma2": _HEADS | _WINDOW | _UNTIED | {"query_pre_attn_scalar": 16},
    "gemma3_text": _HEADS
    | _WINDOW
    | _UNTIED
    | {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": _HEADS,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512} | _ALONE,
    "gpt_neox": _ALONE,
    "gpt_oss": _HEADS | _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8} | _ALONE,
    "granite": {},
    "llama": {},
    "mistral": _WINDOW,
    "mixtral": _WINDOW | {"num_local_experts": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512} | _ALONE,
    "olmo2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64} | _ALONE,
    "phi": {},
    "phi3": {},
    "qwen2": _WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _HEADS,
    "qwen3_moe": _HEADS | _EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "stablelm": {},
    "starcoder2": _WINDOW,
}

# Those that only transformers' own forward runs.
PADDED_FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 16}
    | _ALONE,
}

_INDEX: Final = {"index_n_heads": 2, "index_head_dim": 16}

# Those that attend to a choice of keys in sequences longer than a number of tokens.
CHOOSING_FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v32": _LATENT | _INDEX | {"index_topk": 20},
    "llama4_text": _HEADS
    | {
        "attention_chunk_size": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "minimax_m3_vl_text": _HEADS
    | _INDEX
    | {
        "index_block_size": 16,
        "index_topk_blocks": 3,
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
    },
}


def tiny_model(family: str, num_layers: int = 2, **options: object) -> PreTrainedModel:
    """A float32 model, loud enough that its tokens differ; ``options`` of its config beside those it needs."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1}
    own = (FAMILIES | PADDED_FAMILIES | CHOOSING_FAMILIES)[family] | options
    keys = {key: value for key, value in (shape | special | own).items() if value is not None or key in special}
    keys |= {name: num_layers for name in ("num_hidden_layers", "n_layer", "n_layers") if name in keys}
    if "layer_types" in keys:
        keys["layer_types"] = (keys["layer_types"] * num_layers)[:num_layers]
    config = AutoConfig.for_model(family.split("-")[0], **keys)
    # Eager attention adds Falcon's ALiBi twice, to the mask and to the products; sdpa adds it once.
    config._attn_implementation = "sdpa" if family == "falcon-alibi" else "eager"
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    make_loud(model)
    model.generation_config.eos_token_id = None
    return model


def make_loud(model: PreTrainedModel) -> None:
    """Draw the parameters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or ".ln" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.normal_(0, 0.1 if name.endswith("bias") else MATRIX_STD)


def spoil(cache: PageCache) -> None:
    """Fill pages with what spoils whatever it is added to."""
    homes = [part for home in cache._homes for part in home] if isinstance(cache, HostedKVCache) else []
    for part in [*homes, *(part for layer in cache.layers if layer for part in layer.parts())]:
        part.fill_(float("nan"))
    if isinstance(cache, HostedKVCache):
        spoil_slots(cache)


def spoil_slots(cache: HostedKVCache) -> None:
    """The same for what pages pass through; between passes."""
    for slot in cache._slots:
        for part in slot.parts:
            part.fill_(float("nan"))
        slot.reusable_after = cache._coming.mark_compute()


class Reference:
    """What a model makes of prompts one by one, without a cache."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        self.prompts = prompts
        self.tokens: list[list[int]] = []
        self.logits: list[torch.Tensor] = []
        with torch.no_grad():
            for prompt in prompts:
                ids = torch.tensor([list(prompt)])
                found = model.generate(ids, max_new_tokens=num_new, do_sample=False, pad_token_id=1)[0]
                self.tokens.append(found[len(prompt) :].tolist())
                self.logits.append(model(found[None, :-1]).logits[0, len(prompt) - 1 :])

    def check(
        self,
        engine: zinfer.InferenceEngine,
        *,
        chunk: int,
        page_size: int,
        most_part_tokens: int | None = None,
        make_cache: Callable[..., PageCache] = KVCache,
    ) -> None:
        """Computed side by side in chunks, the prompts get the same tokens after the same logits."""
        num_new, device = len(self.tokens[0]), engine.device
        pages_each = -(-(max(map(len, self.prompts)) + num_new) // page_size)
        shape = ModelSpec.read(engine.module.config).kv
        cache = make_cache(shape, len(self.prompts) * pages_each, page_size, torch.float32, device)
        spoil(cache)
        texts = [
            TokenSequence(number, tuple(prompt), num_new, pages=list(range(number, cache.num_pages, len(self.prompts))))
            for number, prompt in enumerate(self.prompts)
        ]
        runner, builder = PassRunner(engine, cache), BatchBuilder(page_size, device, most_part_tokens, cache.stride)
        while any(len(text.output_ids) < num_new for text in texts):
            chunks = [self._chunk(text, chunk) for text in texts if len(text.output_ids) < num_new]
            cache.expect(chunks)
            self._pass(runner, chunks, builder.build(Chunks(chunks)))
        runner.close()
        cache.close()

    @staticmethod
    def _chunk(text: TokenSequence, most_tokens: int) -> Chunk:
        end = min(text.num_computed + most_tokens, text.num_tokens)
        return Chunk(text, text.num_computed, end, end == text.num_tokens)

    def _pass(self, runner: PassRunner, chunks: Sequence[Chunk], batch: RaggedBatch) -> None:
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        logits = runner.run(with_few_counts(batch))[: len(sampling)]  # as a GPU computes them
        assert len(logits) == len(sampling)
        for text, found in zip(sampling, logits.cpu(), strict=True):
            step = len(text.output_ids)
            torch.testing.assert_close(found, self.logits[text.number][step], rtol=1e-3, atol=1e-3)
            assert int(found.argmax()) == self.tokens[text.number][step], f"prompt {text.number}, token {step}"
            text.output_ids.append(int(found.argmax()))
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
