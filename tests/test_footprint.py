"""The footprint is a bound: above the measured peak of `generate`, and not far above it."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_support import CONFIGS, outline_of, write_config
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from zinfer.engine.own_pairs import OwnPairs
from zinfer.errors import ConfigError, PlanError
from zinfer.jobs.embedding_head import EmbeddingHead
from zinfer.jobs.encoder import embeddings
from zinfer.kernels.padded_attention import padded_attention_bytes
from zinfer.model.spec import ModelSpec
from zinfer.planning.memory import Footprint, Request, find_encoding_footprint, find_footprint, weight_budget

MOST_OVER = 3.0  # times the measured peak
MOST_OVER_BYTES = 128 << 10  # what is held for scratch weighs more than a tiny model
WINDOW = 24
REQUESTS = (Request(3, 300, 3), Request(8, 8, 24), Request(1, 96, 4))


def config_of(family: str, width: int) -> PreTrainedConfig:
    shape = {"vocab_size": 1000, "hidden_size": width, "num_hidden_layers": 3, "num_attention_heads": 8}
    gated = shape | {"intermediate_size": 2 * width + width // 2, "num_key_value_heads": 2}
    latent = {"kv_lora_rank": width // 4, "q_lora_rank": width // 2, "qk_nope_head_dim": width // 8}
    configs: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: LlamaConfig(**gated),
        "mistral": lambda: MistralConfig(**gated, sliding_window=WINDOW),
        "opt": lambda: OPTConfig(**shape, ffn_dim=4 * width, word_embed_proj_dim=width),
        "gpt2": lambda: GPT2Config(**shape, n_positions=512),
        "bloom": lambda: BloomConfig(**shape),
        "mixtral": lambda: MixtralConfig(**gated, num_local_experts=8),
        "deepseek_v3": lambda: DeepseekV3Config(
            **shape,
            **latent,
            num_key_value_heads=8,
            intermediate_size=2 * width,
            moe_intermediate_size=width // 2,
            qk_rope_head_dim=width // 16,
            v_head_dim=width // 8,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
        ),
    }
    return configs[family]()


def model_of(family: str, width: int, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    chosen = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(config_of(family, width), dtype=dtype, **chosen).eval()
    model.generation_config.eos_token_id = None
    return model


def batch_of(request: Request, device: str) -> dict[str, Any]:
    """Random prompts, one of them shorter, so that transformers makes its masks."""
    ids = torch.randint(3, 1000, (request.batch_size, request.prompt_len), device=device)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": request.new_tokens}
    return {"input_ids": ids, "attention_mask": mask, **options}


def measured_peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator held at once, kernels' own buffers included, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, held_bytes)
    return peak_bytes


def check_bound(footprint: Footprint, peak_bytes: int, most_over: float = MOST_OVER) -> None:
    assert peak_bytes > 0
    assert peak_bytes <= footprint.nbytes <= most_over * peak_bytes + MOST_OVER_BYTES


CASES = [
    *((family, None) for family in ("llama", "mistral", "opt", "gpt2", "bloom", "mixtral", "deepseek_v3")),
    *((family, "eager") for family in ("llama", "opt", "mixtral")),
]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_few_tokens_over_pages_count_the_workspace_of_a_cpu(family: str) -> None:
    """What attention gathers depends on the contexts behind them."""
    spec = ModelSpec.read(config_of(family, 64))
    workspace = padded_attention_bytes(spec.num_heads, spec.kv.num_heads, spec.kv.key_dim, spec.kv.value_dim)
    on_cpu, on_gpu = (
        find_footprint(spec.over_pages(), torch.float32, Request(1, 4, 1), on_cuda=on_cuda).activation_bytes
        for on_cuda in (False, True)
    )
    assert on_gpu < workspace < on_cpu < workspace + (256 << 10)


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (64, torch.float32),
        (256, torch.bfloat16),
        pytest.param(64, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(256, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_the_bound_holds_and_is_near(family: str, attention: str | None, width: int, dtype: torch.dtype) -> None:
    model = model_of(family, width, dtype, attention)
    spec = ModelSpec.read(model.config)
    for request in REQUESTS:
        batch = batch_of(request, "cpu")
        peak_bytes = measured_peak_bytes(lambda batch=batch: model.generate(**batch))  # type: ignore[misc]
        check_bound(find_footprint(spec, dtype, request, on_cuda=False), peak_bytes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_bound_holds_for_a_rank_that_every_pair_is_of(family: str) -> None:
    """As if the experts of the other ranks were chosen by no token; their tokens are copied once more."""
    model = model_of(family, 64, torch.float32)
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            own = OwnPairs((0, 8))
            module.register_forward_pre_hook(own.keep)
            module.register_forward_hook(own.spread)
    spec = ModelSpec.read(model.config)
    for request in REQUESTS:
        batch, footprint = batch_of(request, "cpu"), find_footprint(spec, torch.float32, request, on_cuda=False)
        peak_bytes = measured_peak_bytes(lambda batch=batch: model.generate(**batch))  # type: ignore[misc]
        check_bound(footprint, peak_bytes)
        assert own.num_computed > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_the_bound_holds_on_cuda(family: str, attention: str | None, dtype: torch.dtype) -> None:
    model = model_of(family, 1024, dtype, attention).to("cuda")
    model.__dict__["_optimize_model_for_decode"] = nullcontext  # as an engine runs it
    spec = ModelSpec.read(model.config)
    for request in (Request(8, 500, 8), Request(32, 32, 96)):
        batch = batch_of(request, "cuda")
        model.generate(**batch)  # workspaces of libraries, which the reserve is for
        torch.cuda.synchronize()
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model.generate(**batch)
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
        assert 0 < peak_bytes <= find_footprint(spec, dtype, request).nbytes


ENCODERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert": lambda: BertConfig(vocab_size=1000, hidden_size=256, num_hidden_layers=3, num_attention_heads=8),
    "distilbert": lambda: DistilBertConfig(vocab_size=1000, dim=256, hidden_dim=2560, n_layers=3, n_heads=8),
    "t5": lambda: T5Config(vocab_size=1000, d_model=256, d_ff=4096, d_kv=32, num_layers=3, num_heads=8),
    "bart": lambda: BartConfig(
        vocab_size=1000, d_model=256, encoder_ffn_dim=512, encoder_attention_heads=8, encoder_layers=3, decoder_layers=1
    ),
    "llama": lambda: config_of("llama", 256),
}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ENCODERS)
def test_the_bound_of_encoders_holds_and_is_near(family: str, attention: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(ENCODERS[family](), dtype=dtype, attn_implementation=attention).eval()
    spec = ModelSpec.read_encoder(model.config)
    for num_rows, row_len in ((3, 300), (32, 16), (1, 96)):
        inputs = {"input_ids": torch.randint(3, 1000, (num_rows, row_len))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, -2:] = 0
        with torch.no_grad():
            peak_bytes = measured_peak_bytes(
                lambda inputs=inputs: embeddings(model, inputs, EmbeddingHead())  # type: ignore[misc]
            )
        most_over = 3.5 if (family, attention) == ("bart", "eager") else MOST_OVER  # its softmax is no float32 one
        check_bound(find_encoding_footprint(spec, dtype, num_rows, row_len, on_cuda=False), peak_bytes, most_over)


@pytest.mark.slow
def test_a_cpu_without_16_bit_products_stays_within_the_bound() -> None:
    """oneDNN then sums them in float32 buffers; which instructions it may use it reads once a process."""
    test = f"{__file__}::test_the_bound_of_encoders_holds_and_is_near[llama-sdpa-torch.bfloat16]"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", test], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout


def cache_bytes(cache: Any) -> int:
    return sum(state.untyped_storage().nbytes() for layer in cache.layers for state in (layer.keys, layer.values))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "mistral", "bloom", "deepseek_v3"])
@pytest.mark.parametrize(("prompt_len", "num_passes"), [(96, 1), (96, 6), (8, 60)])
def test_the_cache_is_counted_as_transformers_holds_it(family: str, prompt_len: int, num_passes: int) -> None:
    """The tensors' own storages, for a window's layer keeps its whole prompt behind a view."""
    model = model_of(family, 64, torch.float32)
    cache, tokens, most_bytes = None, torch.randint(3, 1000, (2, prompt_len)), 0
    with torch.no_grad():
        for _ in range(num_passes):
            output = model(tokens, past_key_values=cache, use_cache=True)
            cache, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
            most_bytes = max(most_bytes, cache_bytes(cache))
    counted = find_footprint(ModelSpec.read(model.config), torch.float32, Request(2, prompt_len, num_passes)).kv_bytes
    one_token = 2 * 3 * ModelSpec.read(model.config).cached * 4
    assert most_bytes <= counted <= most_bytes + one_token


def spec_of(name: str, folder: Path) -> ModelSpec:
    return outline_of(write_config(folder, CONFIGS[name])).spec


def test_the_cache_of_large_models_by_hand(tmp_path: Path) -> None:
    request = Request(32, 512, 128)
    tokens = 32 * 640
    grouped = find_footprint(spec_of("Llama-3-70B", tmp_path / "llama"), torch.bfloat16, request)
    assert grouped.kv_bytes == tokens * 80 * 2 * 8 * 128 * 2
    whole = find_footprint(spec_of("OPT-175B", tmp_path / "opt"), torch.float16, request)
    assert whole.kv_bytes == tokens * 96 * 2 * 12288 * 2
    assert grouped.decode_kv_bytes == 32 * 576 * 80 * 2 * 8 * 128 * 2


def test_decode_passes_copy_no_weights_of_experts(tmp_path: Path) -> None:
    """One copy for each token and expert it chose would be 39 GB here."""
    spec = spec_of("Mixtral-8x22B", tmp_path)
    assert find_footprint(spec, torch.bfloat16, Request(32, 1, 64)).activation_bytes < 100_000_000


@given(st.integers(1, 64), st.integers(1, 400), st.integers(1, 400), st.sampled_from(["batch", "prompt", "new"]))
def test_a_larger_request_never_takes_less(batch_size: int, prompt_len: int, new_tokens: int, grown: str) -> None:
    spec = ModelSpec.read(config_of("mistral", 64))
    small = find_footprint(spec, torch.float16, Request(batch_size, prompt_len, new_tokens))
    larger = Request(batch_size + (grown == "batch"), prompt_len + (grown == "prompt"), new_tokens + (grown == "new"))
    large = find_footprint(spec, torch.float16, larger)
    assert large.kv_bytes >= small.kv_bytes
    assert large.activation_bytes >= small.activation_bytes
    assert large.decode_kv_bytes >= small.decode_kv_bytes


def test_the_weights_get_what_is_left() -> None:
    footprint = Footprint(kv_bytes=5_000_000_000, activation_bytes=1_000_000_000, decode_kv_bytes=0)
    assert weight_budget(48_000_000_000, footprint) == 48_000_000_000 - 800_000_000 - 1_440_000_000 - 6_000_000_000


def test_a_request_that_leaves_nothing_says_what_to_lower() -> None:
    footprint = Footprint(kv_bytes=7_000_000_000, activation_bytes=1_000_000_000, decode_kv_bytes=0)
    with pytest.raises(PlanError, match=r"KV cache takes 7\.00 GB.*8\.00 GB device memory.*lower the batch size"):
        weight_budget(8_000_000_000, footprint)


@pytest.mark.parametrize("lengths", [(0, 1, 1), (1, -3, 1), (1, 1, 0), (1, 2.5, 1), (True, 1, 1)])
def test_a_request_of_nothing_is_refused(lengths: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"is .*; give a whole number of at least 1"):
        Request(*lengths)


def test_a_cpu_holds_nothing_back_for_cuda() -> None:
    footprint = Footprint(kv_bytes=300, activation_bytes=200, decode_kv_bytes=0)
    assert weight_budget(1_000, footprint, on_cuda=False) == 500
    with pytest.raises(PlanError, match="the reserve 800"):
        weight_budget(1_000, footprint)
