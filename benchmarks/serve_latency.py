"""Measures how long clients wait for tokens where a pass is expensive, and what guessing tokens saves there.

    python benchmarks/serve_latency.py [--cases static,chats,lookup] [--layers 4] [--small] [--folder DIR] [--out FILE]

* ``static``: prompts of 2,600 tokens with 60 new ones, the setting of DeepSpeed-FastGen's figures, on Llama-3-8B's
  shape, resident. They arrive at random at ``--load`` of what static batches complete. ``zinfer serve`` answers them;
  then a loop does that gives all who wait, ``--batch`` at most, to `LLM.generate` and lets nobody in until they have
  ended. A token's latency is a request's seconds over its new tokens.
* ``chats``: eight chats that never pause, OPT-30B's layers as INT8 in host memory. The time between two tokens of a
  text over the seconds that the link needs for the bytes of a pass.
* ``lookup``: eight texts that repeat a text of their prompt but for each sixteenth token, which they correct; layers of
  Llama-3-70B's width in host memory. Tokens a second with and without guesses from the prompt. The layers compute in
  vain: their outputs are weighed with zeros, and the head gives each token's successor.

Where weights stream, the KV cache is too small for a layer in its idle pages, as on a card full of texts.
Weights are random and written to ``--folder``, by default a temporary one. Kernels are compiled before the clock runs.
The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from ceilings import link_bytes_per_s
from random_model import llama_config, opt_config, random_model, save_random
from result import keep, publish
from serve import Bodies, bodies, chatting, give_back_memory, send, server
from serve_load import Answer, figures, percentiles, streamed
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from zinfer import LLM, SamplingParams

_VOCAB: Final = 32_000
_HOST: Final = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
_LINK_BYTES: Final = 1 << 30
_WRONG_EVERY: Final = 16
_NUM_CHATS: Final = 8
_NUM_TEXTS: Final = 8


class Shapes:
    """The models and sizes of the cases.

    Args:
        is_small: whether they are narrow, to run anywhere.
        num_layers: of the models whose layers stream.
    """

    def __init__(self, is_small: bool, num_layers: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.float16 if self.device == "cuda" else torch.float32
        self.prompt_len, self.new = (40, 6) if is_small else (2600, 60)
        self.chat = (8, 4) if is_small else (128, 128)
        self.text_len = 48 if is_small else 256
        self.cache: dict[str, Any] = {} if is_small else {"kv_cache_memory": "600MB"}
        self.opt = opt_config(2, 256) if is_small else opt_config(2 * num_layers, 7168)
        self.wide = _llama(2, 64) if is_small else llama_config(num_layers)
        self.resident = _llama(2, 64) if is_small else _llama(32, 4096)
        for config in (self.opt, self.wide, self.resident):
            config.vocab_size = _VOCAB


def _llama(num_layers: int, hidden_size: int) -> LlamaConfig:
    """Llama-3-8B's proportions: heads of 128 (here of 16 where it is narrow), four to one of keys and values."""
    head_dim = 128 if hidden_size >= 1024 else 16
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=hidden_size // head_dim // 4,
        max_position_embeddings=8192,
    )


def write_model(folder: Path, config: PretrainedConfig, shapes: Shapes) -> Path:
    """Write a random checkpoint with a tokenizer of one word a token."""
    save_random(folder, config, shapes.dtype, shapes.device)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(_VOCAB)}, unk_token="w0"))
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def write_editor(folder: Path, config: LlamaConfig, shapes: Shapes) -> Path:
    """Write a model whose next token is the last one's successor, whatever was before it."""
    model = random_model(config, shapes.dtype, shapes.device)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data.roll(1, 0))
    model.save_pretrained(folder, max_shard_size="5GB")
    return folder


@contextmanager
def serving(model: Path, config: dict[str, Any]) -> Iterator[str]:
    """A server's URL."""
    written = model / "zinfer.json"
    written.write_text(json.dumps(config))
    with server(["-m", "zinfer", "serve", "--model", model, "--config", written, "--port", "0"]) as url:
        yield url


def in_static_batches(llm: LLM, asked: Bodies, most: int, rate: float) -> list[Answer]:
    """Answer requests that arrive as `serve_load.Load` sends them, a whole batch after the other."""
    draw, due_s, answers = random.Random(0), time.perf_counter(), []
    for _ in asked:
        answers.append(Answer(due_s))
        due_s += draw.expovariate(rate)
    number = 0
    while number < len(asked):
        time.sleep(max(answers[number].due_s - time.perf_counter(), 0.0))
        now_s = time.perf_counter()
        batch = [each for each in answers[number : number + most] if each.due_s <= now_s]
        complete(llm, asked[number : number + len(batch)])
        for answer, body in zip(batch, asked[number:], strict=False):
            answer.ended_s, answer.num_tokens = time.perf_counter(), body["max_tokens"]
        number += len(batch)
    return answers


def complete(llm: LLM, asked: Bodies) -> tuple[float, list[tuple[int, ...]]]:
    """Complete bodies at once; returns seconds, and the new tokens of each."""
    params = [SamplingParams(max_new_tokens=each["max_tokens"], temperature=0.0, ignore_eos=True) for each in asked]
    begin_s = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": each["prompt"]} for each in asked], params)
    return time.perf_counter() - begin_s, [tuple(each.token_ids) for each in found]


def token_latency(answers: Sequence[Answer]) -> dict[str, Any]:
    """Figures of a load, and the milliseconds of a request for each of its new tokens."""
    found = figures(answers)
    each_ms = percentiles([(each.ended_s - each.due_s) / each.num_tokens for each in answers])
    return {name: found[name] for name in ("requests_per_s", "tokens_per_s", "between_tokens_ms")} | {
        "token_ms": each_ms
    }


def static(folder: Path, shapes: Shapes, args: argparse.Namespace) -> dict[str, Any]:
    """The server beside static batches, at the same arrivals."""
    model = write_model(folder, shapes.resident, shapes)
    warm, filled, asked = (
        bodies(number, shapes.prompt_len, shapes.new, _VOCAB, seed)
        for seed, number in enumerate((args.batch, args.batch, args.requests))
    )
    with LLM(str(model)) as llm:
        complete(llm, warm)
        seconds, _ = complete(llm, filled)
        rate = args.load * args.batch / seconds
        batches = token_latency(in_static_batches(llm, asked, args.batch, rate))
    give_back_memory()
    with serving(model, {"zinfer": {"max_token_latency": args.latency}} if args.latency else {}) as url:
        send(url, streamed(warm))
        answers = token_latency(send(url, streamed(asked), rate=rate))
    times = batches["token_ms"]["p95"] / answers["token_ms"]["p95"]
    return {
        "rate": round(rate, 3),
        "static": batches,
        "served": answers,
        "times_lower_p95": round(times, 2),
        "throughput_over": round(answers["tokens_per_s"] / batches["tokens_per_s"], 3),
    }


def chats(folder: Path, shapes: Shapes, args: argparse.Namespace) -> dict[str, Any]:
    """Time between the tokens of chats over a pass's time on the link."""
    rate = link_bytes_per_s(_LINK_BYTES, torch.device("cuda")) if shapes.device == "cuda" else None
    model = write_model(folder, shapes.opt, shapes)
    config = {**_HOST, "zinfer": {**shapes.cache, "quantization": {"bits": 8}, "speculate": "off"}}
    with serving(model, config) as url:
        gaps_s, moved, num_passes = asyncio.run(_talk(url, shapes, args.seconds))
    found: dict[str, Any] = {"gap_ms": percentiles(gaps_s), "passes": num_passes}
    found["pass_gb"] = round(moved / num_passes / 1e9, 3)
    if rate is not None:
        link_ms = 1e3 * moved / num_passes / rate
        found |= {"link_gb_per_s": round(rate / 1e9, 2), "link_ms": round(link_ms, 2)}
        found["p95_over_link"] = round(found["gap_ms"]["p95"] / link_ms, 3)
    return found


async def _talk(url: str, shapes: Shapes, seconds: float) -> tuple[list[float], float, int]:
    """Let chats talk; returns the times between tokens, and the bytes and passes of the time that is measured."""
    asked = streamed(bodies(64 * _NUM_CHATS, *shapes.chat, _VOCAB, 0))
    async with chatting(url, asked, _NUM_CHATS) as answers:
        await asyncio.sleep(seconds / 3)
        begin_s, before = time.perf_counter(), await asyncio.to_thread(_counts, url)
        await asyncio.sleep(seconds)
        end_s, after = time.perf_counter(), await asyncio.to_thread(_counts, url)
    gaps = [
        later_s - earlier_s
        for each in answers
        for earlier_s, later_s in zip(each.times_s, each.times_s[1:], strict=False)
        if begin_s <= earlier_s and later_s <= end_s
    ]
    return gaps, after[0] - before[0], int(after[1] - before[1])


def _counts(url: str) -> tuple[float, float]:
    """Bytes that went over the link, and passes, as the server counts them."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    moved = re.search(r'^zinfer:transferred_bytes_total\{.*of="link".*\} (\S+)$', text, re.M)
    passes = re.search(r"^zinfer:pass_seconds_count\{.*\} (\S+)$", text, re.M)
    assert passes is not None
    return float(moved[1]) if moved is not None else 0.0, float(passes[1])


def texts_to_correct(shapes: Shapes) -> Bodies:
    """Prompts with mistakes; the answer begins with the text's first token, and goes on without them."""
    draw, asked = random.Random(0), []
    for _ in range(_NUM_TEXTS):
        first = draw.randrange(_VOCAB)
        right = [(first + place) % _VOCAB for place in range(shapes.text_len)]
        wrong = [draw.randrange(_VOCAB) if place % _WRONG_EVERY == 9 else each for place, each in enumerate(right)]
        asked.append({"prompt": [*wrong, 0, first], "max_tokens": shapes.text_len - 1})
    return asked


def lookup(folder: Path, shapes: Shapes, _: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of an editing task, with guesses and without."""
    model, asked, found = write_editor(folder, shapes.wide, shapes), texts_to_correct(shapes), {}
    for speculate in ("off", "ngram"):
        with LLM(str(model), {**_HOST, "zinfer": {**shapes.cache, "speculate": speculate}}) as llm:
            complete(llm, [{**each, "max_tokens": shapes.text_len // 4} for each in asked])
            passes, moved = llm.num_passes, llm.stats().bytes_to_device
            seconds, texts = complete(llm, asked)
            passes, moved = llm.num_passes - passes, llm.stats().bytes_to_device - moved
        for body, tokens in zip(asked, texts, strict=True):
            first = body["prompt"][-1]
            assert tokens == tuple((first + place) % _VOCAB for place in range(1, shapes.text_len)), tokens
        num_tokens = sum(each["max_tokens"] for each in asked)
        found[speculate] = {
            "tokens_per_s": round(num_tokens / seconds, 2),
            "passes": passes,
            "pass_gb": round(moved / passes / 1e9, 3),
        }
    found["over_off"] = round(found["ngram"]["tokens_per_s"] / found["off"]["tokens_per_s"], 3)
    return found


_CASES: Final = {"static": static, "chats": chats, "lookup": lookup}


def main() -> None:
    """Measure the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(_CASES))
    parser.add_argument("--layers", type=int, default=4, help="that stream: of 70B's width, and twice as many of OPT's")
    parser.add_argument("--batch", type=int, default=32, help="most requests of a static batch")
    parser.add_argument("--load", type=float, default=0.8, help="arrivals over what static batches complete")
    parser.add_argument("--latency", help="the server's max_token_latency in the static case, such as 25ms")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30, help="of the chats")
    parser.add_argument("--small", action="store_true", help="narrow layers, which run anywhere")
    parser.add_argument("--folder", type=Path, help="where models are written; by default a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = args.cases.split(",")
    if unknown := set(names) - set(_CASES):
        parser.error(f"--cases {', '.join(sorted(unknown))}: there are {', '.join(_CASES)}")
    shapes = Shapes(args.small, args.layers)
    found: dict[str, Any] = {"benchmark": "serve_latency", "small": args.small, "layers": args.layers, "cases": {}}
    found |= {name: getattr(args, name) for name in ("batch", "load", "latency", "requests")}
    for name in names:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found["cases"][name] = _CASES[name](Path(folder), shapes, args)
        print(name, json.dumps(found["cases"][name]), file=sys.stderr, flush=True)
        keep(found, args.out)
    publish(found, args.out)


if __name__ == "__main__":
    main()
