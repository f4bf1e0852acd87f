"""Times resident models at batch size 1, with `enable_cuda_graph` and fused kernels, and transformers in the same run.

    python benchmarks/resident.py [--cases gpt2-1.5b,llama-3-8b,bert-large,t5-3b] [--prompt 128 --new 64] [--small]
                                  [--out FILE]

Models of these shapes with random weights, fp16. ``eager_ms`` and ``ms`` are milliseconds of a token after the first,
of transformers and of `init_inference` (of a forward over the prompt for bert-large), ``times`` the first over the
second, ``llm_ms`` the same of `zinfer.LLM`. ``of_memory`` and ``llm_of_memory`` are the rate at which a token's weights
and KV cache are read, over the rate of a device copy in the same run. All are medians of several, after a warm-up of
the same shape. ``equal_tokens`` counts first tokens that equal transformers': in 16 bits, sequences of random weights
diverge sooner or later.

Checks that logits, or hidden states, are near transformers' own. The last line is JSON. --small is for a quick try.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from device_clock import copy_bytes_per_s
from result import keep, publish
from transformers import PreTrainedModel

import zinfer

_ROUNDS: Final = 5
_WARM_UPS: Final = 3  # the first call of a form, the one that is recorded, and one that is replayed
_FORWARDS: Final = 30
_MOST_ERROR: Final = 0.03
# Published shapes of GPT-2 XL, Llama 3 8B, BERT-Large and T5-3B.
_SHAPES: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "gpt2-1.5b": ("GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "llama-3-8b": (
        "LlamaForCausalLM",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
    ),
    "bert-large": (
        "BertModel",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    ),
    "t5-3b": (
        "T5ForConditionalGeneration",
        {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "decoder_start_token_id": 0},
    ),
}
_SMALL: Final = {
    **{"n_embd": 64, "n_layer": 2, "n_head": 4, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "d_model": 64, "d_kv": 16, "d_ff": 128},
    **{"num_layers": 2, "num_heads": 4},
}


class Bench:
    """One machine, and what is asked of each model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = torch.float16 if self._device.type == "cuda" else torch.float32
        self.copy_rate = copy_bytes_per_s() if self._device.type == "cuda" else 1e9
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(10, 900, (1, args.prompt), generator=generator)

    def measure(self, case: str) -> dict[str, object]:
        """All ways to run one shape."""
        model, ids = self._make(case), self._ids.to(self._device)
        generates = model.can_generate()
        token_bytes = _token_bytes(model, self._args.prompt + self._args.new // 2) if generates else 0
        with torch.no_grad():
            wanted = _state(model, ids)
            eager_s, eager_ids = self._seconds(model, ids)
        model.to("cpu")  # type: ignore[arg-type]
        engine = zinfer.init_inference(model, enable_cuda_graph=True, replace_with_kernel_inject=True)
        for _ in range(_WARM_UPS):
            _check(case, _state(engine, ids), wanted)
        seconds, found_ids = self._seconds(engine, ids)
        found: dict[str, object] = {"eager_ms": _ms(eager_s), "ms": _ms(seconds), "times": round(eager_s / seconds, 2)}
        found |= {"replayed": engine.graphs.replayed, "eager": dict(engine.graphs.eager)}
        found["injected"] = len(engine.injected)
        engine.destroy()
        if generates:
            found["equal_tokens"] = _num_equal(found_ids, eager_ids)
            found["of_memory"] = round(token_bytes / self.copy_rate / seconds, 3)
        if generates and not model.config.is_encoder_decoder:
            found |= self._llm(case, token_bytes, eager_ids)
        return found

    def _llm(self, case: str, token_bytes: int, eager_ids: list[int]) -> dict[str, object]:
        model = self._make(case).to("cpu")  # type: ignore[arg-type]
        gc.collect()
        found: dict[str, object] = {}
        with zinfer.LLM(model, enable_cuda_graph=True, replace_with_kernel_inject=True) as llm:

            def generate(new: int) -> list[int]:
                params = zinfer.SamplingParams(max_new_tokens=new, ignore_eos=True)
                return list(llm.generate({"prompt_token_ids": self._ids[0].tolist()}, params)[0].token_ids)

            seconds = self._token_s(generate)
            found = {"llm_ms": _ms(seconds), "llm_of_memory": round(token_bytes / self.copy_rate / seconds, 3)}
            found["llm_equal_tokens"] = _num_equal(generate(self._args.new), eager_ids)
            found |= {"llm_replayed": llm.graphs.replayed, "llm_eager": dict(llm.graphs.eager)}
        return found

    def _make(self, case: str) -> PreTrainedModel:
        name, shape = _SHAPES[case]
        kind = getattr(transformers, name)
        small = {key: _SMALL.get(key, value) for key, value in shape.items()} if self._args.small else shape
        config = kind.config_class(**small, architectures=[name])
        torch.manual_seed(0)
        with torch.device(self._device):
            model: PreTrainedModel = kind._from_config(config, dtype=self._dtype)
        if model.can_generate():
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        return model.eval()

    def _seconds(self, model: Any, ids: torch.Tensor) -> tuple[float, list[int]]:
        """Of a token after the first, and what was generated; of a forward for a model that generates nothing."""
        module = getattr(model, "module", model)
        if not module.can_generate():
            return _median_s(lambda: _state(model, ids), _FORWARDS), []

        def generate(new: int) -> list[int]:
            found = model.generate(input_ids=ids, max_new_tokens=new, do_sample=False)
            return found[0, -new:].tolist()  # type: ignore[no-any-return]

        return self._token_s(generate), generate(self._args.new)

    def _token_s(self, generate: Callable[[int], list[int]]) -> float:
        first_s, all_s = (_median_s(lambda new=new: generate(new), _ROUNDS) for new in (1, 1 + self._args.new))  # type: ignore[misc]
        return (all_s - first_s) / self._args.new


def _state(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits, or the hidden states of what has none."""
    module = getattr(model, "module", model)
    more = {"decoder_input_ids": ids[:, :1]} if module.config.is_encoder_decoder else {}
    caches = {"use_cache": False} if module.can_generate() else {}
    found: torch.Tensor = model(input_ids=ids, **more, **caches)[0]
    return found


def _check(case: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    if not error < _MOST_ERROR:
        raise SystemExit(f"gate: {case}: the result is off by {error:.4f} of transformers'; no figure is reported")


def _num_equal(found: list[int], wanted: list[int]) -> int:
    pairs = zip(found, wanted, strict=True)
    return next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), len(wanted))


def _median_s(call: Callable[[], object], rounds: int) -> float:
    for _ in range(_WARM_UPS):
        call()
    found = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin_s = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def _token_bytes(model: PreTrainedModel, num_before: int) -> int:
    """What a decoder reads for a token: matrices but tables of embeddings, and keys and values of those before."""
    config: Any = model.config
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    tables -= {id(head.weight)} if head is not None else set()
    parts = [model.get_decoder(), head] if config.is_encoder_decoder else [model]
    parameters = {id(parameter): parameter for part in parts for parameter in part.parameters()}
    weights = [parameter for key, parameter in parameters.items() if key not in tables]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = (
        getattr(config, "d_kv", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    layers = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers
    kv = 2 * layers * heads * width * num_before * 2
    return sum(parameter.nbytes for parameter in weights) + kv


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(_SHAPES))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="few and narrow layers, which run anywhere")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    work = {"benchmark": "resident", "prompt": args.prompt, "new": args.new}
    found: dict[str, object] = {}
    for case in args.cases.split(","):
        found[case] = bench.measure(case)
        print(case, found[case], flush=True)
        gc.collect()
        keep({**work, "cases": found}, args.out)
    publish({**work, "copy_gb_per_s": round(bench.copy_rate / 1e9, 1), "cases": found}, args.out)


if __name__ == "__main__":
    main()
