"""Times the passes that the host bounds: how long Python takes to launch them, and to replay captured ones.

    python benchmarks/launches.py [--layers 4 16] [--width 256] [--out FILE]

Layers are so narrow that a GPU computes them faster than Python launches them. Jobs of a few forms (sequences at once,
tokens a pass, prompt, new tokens) give passes with prompts and with decodes alone, launched and replayed.
``plain_layer_ms`` is what `zinfer probe` measures: the launch of a decoder layer of torch's own modules. The last line
is JSON.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from random_model import random_model
from result import keep, publish
from transformers import LlamaConfig, MixtralConfig, OPTConfig, PretrainedConfig

import zinfer
from zinfer.probe.measure import measure_launch

_VOCAB_SIZE: Final = 1024
# (sequences at once, tokens a pass, prompt, new tokens)
_FORMS: Final = (
    (16, 128, 100, 24),
    (64, 320, 100, 24),
    (256, 320, 100, 24),
    (256, 2048, 200, 24),
    (512, 4096, 100, 24),
)


def config_of(family: str, num_layers: int, width: int) -> PretrainedConfig:
    """A narrow model of a family."""
    common = {"hidden_size": width, "num_hidden_layers": num_layers, "num_attention_heads": width // 64}
    common |= {"vocab_size": _VOCAB_SIZE, "max_position_embeddings": 2048}
    if family == "opt":
        return OPTConfig(ffn_dim=4 * width, word_embed_proj_dim=width, **common)
    kind = {"llama": LlamaConfig, "mixtral": MixtralConfig}[family]
    return kind(intermediate_size=2 * width, num_key_value_heads=width // 128 or 1, **common)


def passes_of(folder: Path, form: tuple[int, ...], *, replays: bool) -> list[tuple[bool, int, int, float]]:
    """(has prompts, tokens, samples, seconds) of each pass of a job, after one that warms up."""
    most, tokens, prompt, new = form
    section = {"max_sequences": most, "tokens_per_pass": tokens, "kv_cache_memory": "1GB"}
    with zinfer.LLM(folder, {"enable_cuda_graph": replays, "zinfer": section}) as llm:
        params = zinfer.SamplingParams(max_new_tokens=new, ignore_eos=True)
        for _ in range(2):
            prompts = torch.randint(_VOCAB_SIZE, (2 * most, prompt)).tolist()
            llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        return [
            (size.num_tokens > size.num_samples, size.num_tokens, size.num_samples, seconds)
            for size, seconds in llm.passes()
        ]


def medians(passes: list[tuple[bool, int, int, float]]) -> dict[str, list[float]]:
    """Of passes with prompts, and of decodes alone: median milliseconds, tokens, samples; how many there were."""
    found = {}
    for name, prompts in (("prompts", True), ("decodes", False)):
        own = [(1e3 * seconds, tokens, samples) for has, tokens, samples, seconds in passes if has == prompts]
        if own:
            found[name] = [*np.median(own, axis=0).round(3).tolist(), len(own)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--families", nargs="+", default=["llama", "opt", "mixtral"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.type == "cuda"
    plain = [round(measure_launch(device, repeats=20) * 1e3, 4) for _ in range(3)]
    figures: dict[str, Any] = {"benchmark": "launches", "width": args.width, "plain_layer_ms": plain, "medians": {}}
    for family, layers in itertools.product(args.families, args.layers):
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(family, layers, args.width)
            random_model(config, torch.float16 if on_cuda else torch.float32, device.type).save_pretrained(folder)
            for form, replays in itertools.product(_FORMS, (False, True) if on_cuda else (False,)):
                name = f"{family}, {layers} layers, {form}, {'replayed' if replays else 'launched'}"
                figures["medians"][name] = medians(passes_of(Path(folder), form, replays=replays))
                print(name, figures["medians"][name], flush=True)
                keep(figures, args.out)
    publish(figures, args.out)


if __name__ == "__main__":
    main()
