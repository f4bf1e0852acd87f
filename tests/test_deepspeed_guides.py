"""Examples of DeepSpeed's guides with nothing changed but the import: tiny models stand in the place of large ones.

Sources: deepspeed.ai (inference and AutoTP tutorials), the docstring of `init_inference`, and DeepSpeed's own tests of
profiling.
"""

import json
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_support import bloom, saved, seeded, world_size
from ranks_support import run_ranks
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.models.t5.modeling_t5 import T5Block

import zinfer as deepspeed

__all__ = ["bloom", "seeded"]  # fixtures


@pytest.fixture(scope="module")
def gpt_neo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = GPTNeoConfig(vocab_size=64, max_position_embeddings=512, **sizes, **special)
    return saved(config, tmp_path_factory.mktemp("gpt_neo"))


@pytest.fixture
def pipe(gpt_neo: Path) -> Any:
    return pipeline("text-generation", model=str(gpt_neo), device="cpu", dtype=torch.float32)


def tiny_t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pre_load_checkpoint", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_initializing_for_inference(pre_load_checkpoint: bool, bloom: Path, tmp_path: Path) -> None:
    """The tutorial's first example, with one GPU."""
    files = [str(path) for path in bloom.glob("*.safetensors")]
    checkpoint_json = tmp_path / "checkpoint.json"
    checkpoint_json.write_text(json.dumps({"type": "ds_model", "version": 0.0, "checkpoints": files}))
    args = Namespace(pre_load_checkpoint=pre_load_checkpoint, checkpoint_json=str(checkpoint_json))
    if args.pre_load_checkpoint:
        model = AutoModelForCausalLM.from_pretrained(bloom)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(bloom))
    tokenizer = AutoTokenizer.from_pretrained(bloom)
    reference = AutoModelForCausalLM.from_pretrained(bloom, dtype=torch.half)
    expected = pipeline("text-generation", model=reference, tokenizer=tokenizer)("1+2=", do_sample=False)

    ds_engine = deepspeed.init_inference(
        model,
        tensor_parallel={"tp_size": 1},
        dtype=torch.half,
        checkpoint=None if args.pre_load_checkpoint else args.checkpoint_json,
        replace_with_kernel_inject=True,
    )
    model = ds_engine.module
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    output = pipe("1+2=", do_sample=False)

    assert output == expected
    ds_engine.destroy()


def test_t5_with_an_injection_policy() -> None:
    model, ids = tiny_t5(), torch.tensor([[5, 6, 7, 1]])
    expected = model.generate(ids, max_new_tokens=8, num_beams=2)

    model = deepspeed.init_inference(
        model,
        tensor_parallel={"tp_size": world_size},
        dtype=torch.float,
        injection_policy={T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")},
    )
    output = model.generate(ids, max_new_tokens=8, num_beams=2)

    assert torch.equal(output, expected)
    model.destroy()


def test_t5_without_one() -> None:
    """As the guide of automatic tensor parallelism has it."""
    model, ids = tiny_t5(), torch.tensor([[5, 6, 7, 1]])
    expected = model.generate(ids, max_new_tokens=8)

    model = deepspeed.init_inference(model, mp_size=world_size, dtype=torch.float)

    assert torch.equal(model.generate(ids, max_new_tokens=8), expected)
    model.destroy()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inject", [True, False])
def test_end_to_end_gpt_neo(pipe: Any, inject: bool) -> None:
    generator = pipe
    torch.manual_seed(3)
    expected = generator("1+2=", do_sample=True, min_length=50)
    torch.manual_seed(3)

    generator.model = deepspeed.init_inference(
        generator.model,
        tensor_parallel={"tp_size": world_size},
        dtype=torch.float,
        replace_with_kernel_inject=inject,
    )
    string = generator("1+2=", do_sample=True, min_length=50)

    assert len(string[0]["generated_text"]) > 30
    assert inject or string == expected
    generator.model.destroy()


def test_the_older_spelling(pipe: Any) -> None:
    expected = pipe("1+2=", do_sample=False)

    pipe.model = deepspeed.init_inference(
        pipe.model, mp_size=world_size, dtype=torch.float, replace_method="auto", replace_with_kernel_inject=False
    )

    assert pipe("1+2=", do_sample=False) == expected
    assert [ignored.path for ignored in pipe.model.settings.without_effect] == ["replace_method"]
    pipe.model.destroy()


def test_int8_with_a_quantization_setting(bloom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(path) for path in bloom.glob("*.safetensors")]
    Path("checkpoint.json").write_text(json.dumps({"type": "BLOOM", "version": 0.0, "checkpoints": files}))
    quantize_groups, mlp_extra_grouping = 8, True
    reference = AutoModelForCausalLM.from_pretrained(bloom).eval()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(bloom))

    model = deepspeed.init_inference(
        model,
        checkpoint="./checkpoint.json",
        dtype=torch.int8,
        quantization_setting=(quantize_groups, mlp_extra_grouping),
    )

    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected, found = reference(ids).logits, model(ids).logits
    assert 0 < (found - expected).abs().mean() < 0.2 * expected.abs().mean()
    model.destroy()


def test_the_patterns_of_the_docstring(gpt_neo: Path) -> None:
    config = {
        "kernel_inject": False,
        "tensor_parallel": {"tp_size": 1},
        "dtype": "fp32",
        "enable_cuda_graph": False,
    }

    def loaded() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(gpt_neo)
        return model

    ids = torch.tensor([[5, 6, 7]])
    expected = loaded().generate(ids, max_new_tokens=6, do_sample=False)
    for make in (
        lambda: deepspeed.init_inference(loaded()),
        lambda: deepspeed.init_inference(loaded(), config=config),
        lambda: deepspeed.init_inference(model=loaded(), config=config),
        lambda: deepspeed.init_inference(loaded(), **config),
        lambda: deepspeed.init_inference(loaded(), config=config, tensor_parallel={"tp_size": 1}, max_tokens=64),
    ):
        engine = make()
        assert torch.equal(engine.generate(ids, max_new_tokens=6, do_sample=False), expected)
        engine.destroy()


@pytest.mark.parametrize("use_cuda_events", [True, False])
def test_model_profiling(pipe: Any, use_cuda_events: bool) -> None:
    """DeepSpeed's tests/unit/inference/test_model_profiling.py, on the CPU."""
    query, inf_kwargs, count = "1+2=", {"do_sample": False, "max_new_tokens": 6}, 4
    inf_kwargs_ds = {"replace_with_kernel_inject": True, "enable_cuda_graph": False, "dtype": torch.float}
    pipe.model = deepspeed.init_inference(pipe.model, mp_size=world_size, **inf_kwargs_ds)
    pipe.model.profile_model_time(use_cuda_events=use_cuda_events)

    e2e_times = []
    model_times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        pipe(query, **inf_kwargs)
        end = time.perf_counter_ns()
        e2e_times.append((end - start) / 1e6)  # convert ns to ms
        model_times.append(pipe.model.model_times())

    for e2e_t, model_t in zip(e2e_times, model_times, strict=True):
        assert len(model_t) == 6
        assert e2e_t >= sum(model_t) > 0, "each lies within its call"
    pipe.model.destroy()


def on_ranks(rank: int, gpt_neo: Path) -> None:
    """The examples that say how many processes divide the layers, in one of two that torchrun started."""
    globals()["world_size"] = int(os.environ["WORLD_SIZE"])

    def pipe() -> Any:
        return pipeline("text-generation", model=str(gpt_neo), device="cpu", dtype=torch.float32)

    test_t5_with_an_injection_policy()
    test_t5_without_one()
    test_end_to_end_gpt_neo(pipe(), inject=False)
    test_the_older_spelling(pipe())


@pytest.mark.slow
def test_two_processes_run_them_unchanged(gpt_neo: Path) -> None:
    run_ranks(2, on_ranks, gpt_neo)
