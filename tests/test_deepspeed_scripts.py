"""The scripts of BLOOM inference by DeepSpeed-Inference and ZeRO-Inference with nothing changed but the import: a tiny
model stands in the place of the large one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_support import bloom, seeded, world_size
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import BloomBlock

import zinfer as deepspeed

__all__ = ["bloom", "seeded"]  # fixtures


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
    model = model.module

    ids = torch.tensor([[5, 6, 7]])
    options = {"do_sample": False, "num_beams": 5, "num_return_sequences": 1, "max_new_tokens": 8}
    expected = AutoModelForCausalLM.from_pretrained(bloom).generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)


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
