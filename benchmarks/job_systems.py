"""The systems that complete a whole job from one saved OPT checkpoint in host memory, with the interface `System`.

Each batches prompts in its own way: zinfer's `LLM` gets all and chooses its passes; DeepSpeed runs one batch of
`generate` after another; FlexLLMGen its block schedule (Sheng et al. 2023, arXiv 2303.06865), with several device
batches for each load of a layer's weights, and the KV cache on the device.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peer_systems import EXAMPLE_AHEAD, FAR_AHEAD, Running, System, start_deepspeed
from safetensors import safe_open
from transformers import OPTConfig

import zinfer

_EXAMPLE_ROWS: Final = 96  # with what DeepSpeed's example sets
_MOST_ROWS: Final = 256  # twice as many do not fit an H200 beside their activations
_FLEXGEN_BATCHES: Final = 4  # to each load of the weights, of as many prompts as are left to each
_FLEXGEN_ROWS: Final = 256


def start_llm(folder: Path, scratch: Path, device: torch.device) -> Running:
    """zinfer's batches: weights as they are, keys and values in INT8."""
    offload = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    # The gate's model is to give transformers' own tokens, for which INT8 is too coarse.
    kind = "auto" if OPTConfig.from_pretrained(folder).dtype == torch.float32 else "int8"
    llm = zinfer.LLM(folder, {**offload, "zinfer": {"kv_cache_dtype": kind}})

    def generate(*, input_ids: torch.Tensor, max_new_tokens: int, **options: object) -> torch.Tensor:
        params = zinfer.SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": ids} for ids in input_ids.tolist()], params)
        new = torch.tensor([completion.token_ids for completion in found])
        return torch.cat((input_ids.cpu(), new), dim=1)

    return Running(generate, lambda: llm.stats().streamed_bytes_per_pass, lambda: None, llm.close)


def start_flexgen(folder: Path, scratch: Path, device: torch.device) -> Running:
    """FlexLLMGen's own OPT in its own format, all weights in pinned host memory; it computes in half precision.

    How many prompts come at once is known at the first call; later ones take as many.
    """
    from flexgen.flex_opt import ExecutionEnv, OptLM  # type: ignore[import-not-found, unused-ignore]

    saved = OPTConfig.from_pretrained(folder)
    config = _flexgen_config(saved)
    _write_arrays(folder, scratch / f"{config.name}-np")
    env = ExecutionEnv.create(str(scratch / "offload"))
    models: list[Any] = []

    def generate(*, input_ids: torch.Tensor, max_new_tokens: int, **options: object) -> torch.Tensor:
        if not models:
            models.append(OptLM(config, env, str(scratch), _flexgen_policy(len(input_ids))))
        found = models[0].generate(input_ids.tolist(), max_new_tokens=max_new_tokens)
        return torch.from_numpy(np.asarray(found))

    def away_bytes() -> int:
        homes = [weight for home in models[0].weight_home for weight in _flat(home.val)]
        layers = [weight for weight in homes if weight.shape[0] != config.vocab_size]
        away = [weight for weight in layers if weight.device.dev.type == "cpu"]
        return sum(math.prod(weight.shape) for weight in away) * saved.dtype.itemsize  # of the checkpoint's, not half

    def close() -> None:
        models.clear()
        env.close_copy_threads()

    return Running(generate, away_bytes, lambda: None, close)


def _flexgen_config(config: OPTConfig) -> Any:
    from flexgen.opt_config import OptConfig  # type: ignore[import-not-found, unused-ignore]

    return OptConfig(
        name="opt-checkpoint",
        num_hidden_layers=config.num_hidden_layers,
        max_seq_len=config.max_position_embeddings,
        hidden_size=config.hidden_size,
        n_head=config.num_attention_heads,
        input_dim=config.hidden_size,
        ffn_embed_dim=config.ffn_dim,
        vocab_size=config.vocab_size,
    )


def _flexgen_policy(num_rows: int) -> Any:
    """Weights in host memory, the rest on the device, copies overlapping compute: what its guide sets, uncompressed."""
    from flexgen.compression import CompressionConfig  # type: ignore[import-not-found, unused-ignore]
    from flexgen.flex_opt import Policy

    num_batches = _FLEXGEN_BATCHES if num_rows % _FLEXGEN_BATCHES == 0 else num_rows
    unused = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    return Policy(
        gpu_batch_size=num_rows // num_batches,
        num_gpu_batches=num_batches,
        w_gpu_percent=0,
        w_cpu_percent=100,
        cache_gpu_percent=100,
        cache_cpu_percent=0,
        act_gpu_percent=100,
        act_cpu_percent=0,
        overlap=True,
        sep_layer=True,
        pin_weight=True,
        cpu_cache_compute=False,
        attn_sparsity=1.0,
        compress_weight=False,
        comp_weight_config=unused,
        compress_cache=False,
        comp_cache_config=unused,
    )


def _write_arrays(folder: Path, target: Path) -> None:
    """The checkpoint as FlexLLMGen's converter writes it: a half-precision array a tensor, by the release's names."""
    target.mkdir(parents=True)

    def write(name: str, tensor: torch.Tensor) -> None:
        with (target / name).open("wb") as file:
            np.save(file, tensor.half().numpy())

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dict)
                tensor = file.get_tensor(name)
                plain = name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
                write(plain, tensor)
                if plain == "decoder.embed_tokens.weight":
                    write("lm_head.weight", tensor)


def _flat(value: Any) -> list[Any]:
    """A layer's weights, which may hold those of its halves."""
    parts = value if isinstance(value, list | tuple) else [value]
    return [weight for part in parts for weight in (_flat(part.val) if hasattr(part, "val") else [part])]


JOB_SYSTEMS: Final = (
    System("zinfer-job", "zinfer", "host", start_llm),
    System(
        "deepspeed-cpu-job",
        "deepspeed",
        "host",
        partial(start_deepspeed, tier="host", ahead=EXAMPLE_AHEAD),
        most_rows=_EXAMPLE_ROWS,
    ),
    System(
        "deepspeed-cpu-ahead-job",
        "deepspeed",
        "host",
        partial(start_deepspeed, tier="host", ahead=FAR_AHEAD),
        most_rows=_MOST_ROWS,
    ),
    System("flexgen-job", "flexgen", "host", start_flexgen, most_rows=_FLEXGEN_ROWS, is_half=True),
)
