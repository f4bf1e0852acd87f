"""Times the host's work for each pass of a job, on the CPU alone, with a trivial model whose logits are given.

    python benchmarks/host_passes.py [--texts 1000 --prompts 4096 --prompt 512 --new 32] [--out FILE]

``mixed``: prompts begin in every pass of 16,384 tokens, as other sequences end. ``decodes``: all sequences begin at
once, and passes have a token of each. The figures are `HostWork.figures`: scheduling, building a pass's tensors,
sampling, processing tokens. They include sampling from 64 tokens on the CPU itself. The last line is JSON.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Final
from unittest import mock

import torch
from host_work import HostWork
from random_model import opt_config, save_random
from result import publish

import zinfer
from zinfer.batching.ragged import RaggedBatch
from zinfer.batching.runner import PassRunner

_VOCAB_SIZE: Final = 64
_MIXED_TOKENS: Final = 16384
_WIDTH: Final = 128


def measure(folder: Path, args: argparse.Namespace, num_prompts: int, tokens_per_pass: int) -> dict[str, float]:
    """The figures of one job."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(_VOCAB_SIZE, (num_prompts, args.prompt), generator=generator).tolist()
    logits = torch.randn(num_prompts, _VOCAB_SIZE, generator=generator)

    def run(self: PassRunner, batch: RaggedBatch) -> torch.Tensor:
        self.num_passes += 1
        return logits[: len(batch.wanted)]

    text_bytes = 2 * _WIDTH * 4 * (args.prompt + args.new + 64)
    sizes = {"max_sequences": args.texts, "tokens_per_pass": tokens_per_pass}
    section = {**sizes, "kv_cache_memory": int(1.1 * args.texts * text_bytes)}
    host_work = HostWork()
    with zinfer.LLM(folder, {"zinfer": section}, device="cpu") as llm, mock.patch.object(PassRunner, "run", run):
        params = zinfer.SamplingParams(max_new_tokens=args.new, ignore_eos=True)
        with host_work.watched():
            llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        return host_work.figures([size for size, _ in llm.passes()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000, help="at once")
    parser.add_argument("--prompts", type=int, default=4096, help="of the job in which others begin as some end")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        config = opt_config(1, _WIDTH)
        config.vocab_size = _VOCAB_SIZE
        save_random(Path(temporary), config, torch.float32, "cpu")
        figures = {
            "mixed": measure(Path(temporary), args, args.prompts, _MIXED_TOKENS),
            "decodes": measure(Path(temporary), args, args.texts, args.texts * args.prompt),
        }
    work = {name: getattr(args, name) for name in ("texts", "prompts", "prompt", "new")}
    publish({"benchmark": "host_passes", **work, "host": figures}, args.out)


if __name__ == "__main__":
    main()
