"""What guides to DeepSpeed's inference show, block by block, with `import zinfer as deepspeed` and a tiny GPT-2."""

import asyncio
import os
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_support import DEMO, saved, seeded
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel
from ranks_support import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

import zinfer as deepspeed
from zinfer.accelerator import get_accelerator
from zinfer.ops.transformer.inference import (
    Config,
    DeepSpeedTransformerInference,
    QuantizationConfig,
    QuantizationType,
    quantize_transformer,
)

__all__ = ["seeded"]  # a fixture

PROMPTS = ["1+2=", "30+4=", "7+8=", "9*9="]
tokenizer = AutoTokenizer.from_pretrained(DEMO)
device = get_accelerator().current_device_name()
Block = Callable[[Path, int], Any]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=128, **special)
    return saved(config, tmp_path_factory.mktemp("gpt2"))


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def ids_of(prompt: str | list[str] = PROMPTS[0]) -> torch.Tensor:
    ids: torch.Tensor = tokenizer(prompt, return_tensors="pt", padding=True).input_ids
    return ids.to(device)


def texts(model: Any, **options: Any) -> list[str]:
    """The greedy answer to each prompt, one by one."""
    options = {"max_length": 24, "do_sample": False, **options}
    return [tokenizer.decode(model.generate(ids_of(each), **options)[0]) for each in PROMPTS]


def basic(folder: Path, num_ranks: int) -> Any:
    return deepspeed.init_inference(
        loaded(folder), mp_size=num_ranks, dtype=torch.float32, replace_with_kernel_inject=True
    )


def minimal(folder: Path, num_ranks: int) -> Any:
    return deepspeed.init_inference(loaded(folder), dtype=torch.float32, replace_with_kernel_inject=True)


def optimized(folder: Path, num_ranks: int) -> Any:
    return deepspeed.init_inference(
        loaded(folder),
        mp_size=num_ranks,
        dtype=torch.float32,
        replace_with_kernel_inject=True,
        replace_method="auto",
        max_out_tokens=64,
        min_out_tokens=1,
    )


def configured(folder: Path, num_ranks: int) -> Any:
    config = Config(
        max_out_tokens=64,
        min_out_tokens=1,
        mp_size=num_ranks,
        replace_with_kernel_inject=True,
        dtype=torch.float32,
        enable_cuda_graph=False,
    )
    engine = deepspeed.init_inference(loaded(folder), config=config)
    assert engine.settings.max_out_tokens == config.max_out_tokens == 64
    return engine


def shaped_by_hand(folder: Path, num_ranks: int) -> Any:
    config = Config(hidden_size=32, heads=4, layer_norm_eps=1e-5, max_out_tokens=64)
    engine = deepspeed.init_inference(loaded(folder), config=config, replace_with_kernel_inject=True)
    assert {each.path for each in engine.settings.without_effect} == {"hidden_size", "heads", "layer_norm_eps"}
    return engine


def zero_inference(folder: Path, num_ranks: int) -> Any:
    offload = {"device": "cpu", "pin_memory": True}
    config = {"fp16": {"enabled": False}, "zero_optimization": {"stage": 3, "offload_param": offload}}
    engine = deepspeed.init_inference(loaded(folder), config=config, mp_size=num_ranks)
    assert engine.stats().blocks_by_home["HOST"] == 3
    return engine


def with_graphs(folder: Path, num_ranks: int) -> Any:
    return deepspeed.init_inference(
        loaded(folder), dtype=torch.float32, replace_with_kernel_inject=True, enable_cuda_graph=True
    )


def built_by_zero_init(folder: Path, num_ranks: int) -> Any:
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": False}}
    with deepspeed.zero.Init(config_dict_or_path=config, remote_device="cpu", pin_memory=True):
        model = loaded(folder)
    return deepspeed.initialize(model=model, config=config)[0]


def from_the_command_line(folder: Path, num_ranks: int) -> Any:
    file = folder / "ds_config.json"
    file.write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "train_batch_size": 1}')
    parser = deepspeed.add_config_arguments(ArgumentParser())
    args: Namespace = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    assert args.deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(args, loaded(folder))
    assert (optimizer, loader, scheduler) == (None, None, None)
    return engine


EXACT: list[Block] = [basic, minimal, optimized, configured, shaped_by_hand, zero_inference, with_graphs]
EXACT += [built_by_zero_init, from_the_command_line]


def in_eight_bits(folder: Path, num_ranks: int) -> Any:
    return deepspeed.init_inference(loaded(folder), dtype=torch.int8, replace_with_kernel_inject=True)


def with_a_quantization_config(folder: Path, num_ranks: int) -> Any:
    config = QuantizationConfig(q_bits=8, q_type=QuantizationType.ASYMMETRIC, q_groups=1)
    return deepspeed.init_inference(
        loaded(folder),
        dtype=torch.int8,
        quantization_setting=config,
        replace_with_kernel_inject=True,
        mp_size=num_ranks,
    )


def quantized_first(folder: Path, num_ranks: int) -> Any:
    model = quantize_transformer(loaded(folder), quant_bits=8, quant_type="asymmetric", quant_groups=1)
    return deepspeed.init_inference(model, dtype=torch.int8, replace_with_kernel_inject=True)


QUANTIZED: list[Block] = [in_eight_bits, with_a_quantization_config, quantized_first]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block", EXACT, ids=lambda block: block.__name__)
def test_a_block_computes_what_the_model_does(block: Block, gpt2: Path) -> None:
    expected = texts(loaded(gpt2).to(device))
    engine = block(gpt2, 1)
    assert texts(engine) == expected
    assert next(engine.parameters()).dtype == torch.float32
    layer = engine.module.transformer.h[0]
    assert isinstance(layer, DeepSpeedTransformerInference) == bool(engine.settings.kernel_inject)
    engine.destroy()
    assert not isinstance(layer, DeepSpeedTransformerInference)


@pytest.mark.parametrize("block", QUANTIZED, ids=lambda block: block.__name__)
def test_a_block_quantizes(block: Block, gpt2: Path) -> None:
    model = loaded(gpt2).to(device)
    engine = block(gpt2, 1)
    expected, found = model(ids_of()).logits, engine(ids_of()).logits
    assert 0 < (found - expected).abs().mean() < 0.2 * expected.abs().mean()
    assert engine.stats().device_bytes < 0.75 * sum(each.nbytes for each in model.parameters())
    engine.destroy()


def on_ranks(rank: int, folder: Path) -> tuple[list[list[str]], torch.Tensor]:
    """The blocks that say how many processes divide the layers, in one of two that torchrun started."""
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    num_ranks, found = deepspeed.comm.get_world_size(), []
    assert num_ranks == int(os.environ["WORLD_SIZE"])
    for block in (basic, optimized, configured, zero_inference):
        engine = block(folder, num_ranks)
        found.append(texts(engine))
        engine.destroy()
    engine = with_a_quantization_config(folder, num_ranks)
    logits = engine(ids_of()).logits.cpu()
    engine.destroy()
    return found, logits


@pytest.mark.slow
def test_two_processes_run_them(gpt2: Path) -> None:
    model = loaded(gpt2).to(device)
    expected, logits = texts(model), model(ids_of()).logits.detach().cpu()
    for found, quantized in run_ranks(2, on_ranks, gpt2):
        assert found == [expected] * 4
        assert 0 < (quantized - logits).abs().mean() < 0.2 * logits.abs().mean()


def test_prompts_in_a_batch_and_options_of_generate(gpt2: Path) -> None:
    options = {"max_length": 24, "num_beams": 1, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    batch = ids_of(PROMPTS)
    expected = loaded(gpt2).to(device).generate(batch, **options)
    engine = minimal(gpt2, 1)
    assert torch.equal(engine.generate(batch, **options), expected)
    engine.destroy()


def test_a_service(gpt2: Path) -> None:
    app, model = FastAPI(), minimal(gpt2, 1)

    class GenerationRequest(BaseModel):
        prompt: str
        max_length: int = 50

    @app.post("/generate")
    def generate(request: GenerationRequest) -> dict[str, str]:
        with torch.no_grad():
            output = model.generate(
                ids_of(request.prompt), max_length=request.max_length, do_sample=True, top_p=0.95, temperature=0.8
            )
        return {"generated_text": tokenizer.decode(output[0], skip_special_tokens=True)}

    with TestClient(app) as client:
        answer = client.post("/generate", json={"prompt": PROMPTS[0], "max_length": 20})
        assert answer.status_code == 200
        assert answer.json()["generated_text"].startswith(PROMPTS[0])
    model.destroy()


class BatchingEngine:
    """Collects requests for a while and computes them together, padded."""

    def __init__(self, model: Any, max_batch_size: int = 8, max_wait_ms: int = 5) -> None:
        self.model, self.max_batch_size, self.max_wait_ms = model, max_batch_size, max_wait_ms
        self.queue: deque[tuple[str, asyncio.Future[str]]] = deque()

    async def generate(self, prompt: str) -> str:
        self.queue.append((prompt, future := asyncio.get_running_loop().create_future()))
        return await future

    async def process_batch(self) -> None:
        while True:
            await asyncio.sleep(self.max_wait_ms / 1000)
            taken = [self.queue.popleft() for _ in range(min(len(self.queue), self.max_batch_size))]
            if taken:
                outputs = self.model.generate(ids_of([prompt for prompt, _ in taken]), max_length=24, do_sample=False)
                for output, (_, future) in zip(outputs, taken, strict=True):
                    future.set_result(tokenizer.decode(output, skip_special_tokens=True))


def test_a_batching_engine(gpt2: Path) -> None:
    model = minimal(gpt2, 1)

    async def ask() -> list[str]:
        engine = BatchingEngine(model)
        working = asyncio.create_task(engine.process_batch())
        found = await asyncio.gather(*(engine.generate(each) for each in PROMPTS * 3))
        working.cancel()
        return found

    plain, expected = loaded(gpt2).to(device), []
    for batch in (PROMPTS * 2, PROMPTS):
        outputs = plain.generate(ids_of(batch), max_length=24, do_sample=False)
        expected += tokenizer.batch_decode(outputs, skip_special_tokens=True)
    assert asyncio.run(ask()) == expected
    model.destroy()


def test_the_profiler_sees_the_layers(gpt2: Path) -> None:
    engine = minimal(gpt2, 1)
    with torch.profiler.profile() as profile:
        engine.generate(ids_of(), max_length=12)
    assert any("addmm" in each.key or "linear" in each.key for each in profile.key_averages())
    assert "GPT2Block" in str(engine)
    engine.destroy()


def test_the_supported_models_are_those_with_fused_kernels() -> None:
    assert {"LLaMA", "GPT-2", "BLOOM"} <= {*DeepSpeedTransformerInference.supported_models}
    assert "OPT" not in DeepSpeedTransformerInference.supported_models
    with pytest.raises(TypeError, match="replace_with_kernel_inject=True"):
        DeepSpeedTransformerInference(Config())
