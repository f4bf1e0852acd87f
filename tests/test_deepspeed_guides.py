"""Examples of DeepSpeed's guides with nothing changed but the import: tiny models stand in the place of large ones.

Sources: deepspeed.ai (inference and AutoTP tutorials), the docstring of `init_inference`, DeepSpeed's own tests of
profiling, and the scripts of BLOOM inference by DeepSpeed-Inference and ZeRO-Inference.
"""

import json
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPTNeoConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.models.bloom.modeling_bloom import BloomBlock
from transformers.models.t5.modeling_t5 import T5Block

import zinfer as deepspeed

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo" / "model"
local_rank = int(os.getenv("LOCAL_RANK", "0"))
world_size = int(os.getenv("WORLD_SIZE", "1"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def saved(config: Any, folder: Path) -> Path:
    """A random causal language model beside the demo's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt_neo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = GPTNeoConfig(vocab_size=64, max_position_embeddings=512, **sizes, **special)
    return saved(config, tmp_path_factory.mktemp("gpt_neo"))


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4, **special)
    return saved(config, tmp_path_factory.mktemp("bloom"))


@pytest.fixture
def pipe(gpt_neo: Path) -> Any:
    return pipeline("text-generation", model=str(gpt_neo), device="cpu", dtype=torch.float32)


def tiny_t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


@pytest.mark.parametrize("pre_load_checkpoint", [True, False])
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


@pytest.mark.parametrize("kernel_inject", [True, False])
def test_bloom_on_the_meta_device(kernel_inject: bool, bloom: Path, tmp_path: Path) -> None:
    """bloom-ds-inference.py: an empty model, and a checkpoints.json of absolute names written beside the script."""
    dtype, infer_dtype, repo_root = torch.bfloat16, "float32", str(bloom)
    checkpoints_json = str(tmp_path / "checkpoints.json")
    config = AutoConfig.from_pretrained(bloom)
    with deepspeed.OnDevice(dtype=dtype, device="meta"):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)
    model = model.eval()

    def write_checkpoints_json() -> None:
        file_list = [str(entry) for entry in Path(repo_root).rglob("*.safetensors") if entry.is_file()]
        data = {"type": "BLOOM", "checkpoints": file_list, "version": 1.0}
        json.dump(data, open(checkpoints_json, "w"))  # noqa: SIM115

    if kernel_inject:
        kwargs: dict[str, Any] = {"replace_with_kernel_inject": True}
    else:
        kwargs = {"injection_policy": {BloomBlock: ("self_attention.dense", "mlp.dense_4h_to_h")}}
    write_checkpoints_json()
    model = deepspeed.init_inference(
        model,
        mp_size=world_size,
        base_dir=repo_root,
        dtype=getattr(torch, infer_dtype),
        checkpoint=checkpoints_json,
        **kwargs,
    )
    engine, model = model, model.module

    ids = torch.tensor([[5, 6, 7]])
    options = {"do_sample": False, "num_beams": 5, "num_return_sequences": 1, "max_new_tokens": 8}
    expected = AutoModelForCausalLM.from_pretrained(bloom).generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    engine.destroy()


@pytest.mark.parametrize("cpu_offload", [True, False])
def test_zero_inference(cpu_offload: bool, bloom: Path) -> None:
    """bloom-ds-zero-inference.py, without HfDeepSpeedConfig: it has `from_pretrained` split the weights."""
    config = AutoConfig.from_pretrained(bloom)
    dtype = torch.float32
    model_hidden_size = config.hidden_size
    train_batch_size = 1 * world_size
    ds_config: dict[str, Any] = {
        "fp16": {"enabled": dtype == torch.float16},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": model_hidden_size * model_hidden_size,
            "stage3_prefetch_bucket_size": 0.9 * model_hidden_size * model_hidden_size,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": 2000,
        "train_batch_size": train_batch_size,
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    }
    if cpu_offload:
        ds_config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
    ids = torch.tensor([[5, 6, 7]])
    model = AutoModelForCausalLM.from_pretrained(bloom, torch_dtype=dtype)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)

    model = model.eval()
    ds_engine = deepspeed.initialize(model=model, config_params=ds_config)[0]
    ds_engine.module.eval()
    model = ds_engine.module
    outputs = model.generate(ids, max_new_tokens=8, do_sample=False)

    assert torch.equal(outputs, expected)
    assert ds_engine.stats().blocks_by_home["HOST"] == (3 if cpu_offload else 0)
    ds_engine.destroy()


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
