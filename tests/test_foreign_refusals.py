"""What config.json asks for and is not supported is named by its key, with what to do instead."""

from typing import Any

import pytest

from zinfer.errors import CheckpointError
from zinfer.weights.formats import find_scheme

INSTEAD = "; use the full-precision checkpoint and quantize it while loading"
AFTERWARDS = "; restore config.json"


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, **more}


def awq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, **more}


def compressed(**more: Any) -> dict[str, Any]:
    groups = {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel"}}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **more}


def weights(**more: Any) -> dict[str, Any]:
    fields = {"num_bits": 4, "strategy": "channel", **more}
    return compressed(config_groups={"a": {"targets": ["Linear"], "weights": fields}})


def group(**more: Any) -> dict[str, Any]:
    fields = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}, **more}
    return compressed(format="int-quantized", config_groups={"a": fields})


def fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [128, 128], **more}


NOT_SUPPORTED = [
    *(({"quant_method": method}, f"quant_method is '{method}'") for method in ("hqq", "marlin", "quark", "vptq")),
    ({"load_in_4bit": True}, "quant_method is None"),
    *((gptq(bits=bits), f"bits is {bits}: Input should be 4 or 8") for bits in (2, 3)),
    (gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    (gptq(format="gptq_p"), "format is 'gptq_p'"),
    (gptq(is_marlin_format=True), "is_marlin_format is True"),
    (gptq(pack_dtype="int64"), "pack_dtype is 'int64'"),
    (gptq(dynamic={"-:a": {}, "+:.*down": {"bits": 8}}), "+:.*down: modules that are stored otherwise"),
    (awq(bits=8), "bits is 8: Input should be 4"),
    *((awq(version=version), f"version is '{version}'") for version in ("gemv", "gemv_fast", "exllama", "marlin")),
    (awq(format="llm-awq"), "format is 'llm-awq'"),
    (compressed(transform_config={"config_groups": {"u": 1}}), "transform_config is {"),
    (compressed(moe_sparsity_config={"method": "prune"}), "moe_sparsity_config is {"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format is 'sparse-24-bitmask'"),
    (compressed(quantization_status="frozen"), "quantization_status is 'frozen'"),
    (compressed(config_groups={}), "config_groups is {}"),
    (compressed(config_groups=None), "config_groups is {}"),
    *(
        (compressed(format=name), f"config_groups.a.format is '{name}': Input should be 'pack-quantized', ")
        for name in ("marlin-24", "mxfp6-pack-quantized")
    ),
    (weights(num_bits=3), "config_groups.a.weights.num_bits is 3"),
    (weights(type="float", num_bits=8), "weights in the format pack-quantized are of type int"),
    (weights(strategy="tensor_group", group_size=16), "a scale of scales is read in the format nvfp4-pack-quantized"),
    (
        weights(strategy="block", block_structure=[8, 8]),
        "packed weights are read with a scale per tensor, channel or group",
    ),
    (group(input_activations={"dynamic": "once"}), "config_groups.a.input_activations.dynamic is 'once'"),
    (group(output_activations={"dynamic": True}), "config_groups.a.output_activations is {"),
    (
        group(format="float-quantized", weights={"type": "float", "num_bits": 4}),
        "floating-point weights of 4 bits are not stored in the format float-quantized",
    ),
    (group(format="float-quantized", weights={"type": "float", "symmetric": False}), "weights.symmetric is False"),
]
NOT_SUPPORTED += [
    (fp8(fmt="e5m2"), "fmt is 'e5m2': Input should be 'e4m3'"),
    (fp8(activation_scheme="token"), "activation_scheme is 'token': Input should be 'dynamic' or 'static'"),
    (fp8(expert_dtype="int4"), "expert_dtype is 'int4': Input should be 'fp8' or 'fp4'"),
    ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "weight_block_size.0 is 128: Input should be 1"),
    ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "quant_algo is 'int4_awq': Input should be 'fp8', "),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "load_in_4bit is True: Input should be False"),
    (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
        "packing_format is 'auto_round:llm_compressor': Input should be 'auto_round:auto_gptq' or",
    ),
    (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "packing_format": "auto_round:auto_awq",
            "extra_config": {"lm_head": {"bits": 16}, "mlp.up": {"bits": 8}},
        },
        "mlp.up: modules that are stored otherwise than the rest are not read",
    ),
    ({"quant_method": "mxfp4", "rotation": "hadamard"}, "rotation is 'hadamard': not a known key, and it may change"),
    (
        group(format="nvfp4-pack-quantized", weights={"type": "float", "num_bits": 4, "group_size": 32}),
        "a scale in the format nvfp4-pack-quantized is of 16 columns",
    ),
    (fp8(modules_to_convert=["embed_tokens"]), "modules_to_convert is ['embed_tokens']: that is not supported"),
    (fp8(rotation="hadamard"), "rotation is 'hadamard': not a known key, and it may change what weights are"),
    ({"quant_method": "fbgemm_fp8", "weight_block_size": [128, 128]}, "weight_block_size is [128, 128]: not a known"),
    ({"quant_method": 4}, "quant_method is 4: weights are read from"),
    (gptq(bits="4"), "bits is '4': Input should be 4 or 8"),
    (gptq(bits=True), "bits is True: Input should be 4 or 8"),
]
MISSPELT = [
    (fp8(weight_block_size=[128]), "weight_block_size.1 is missing"),
    (fp8(weight_block_size=[128, 0]), "weight_block_size.1 is 0: Input should be greater than 0"),
    (fp8(weight_block_size=128), "weight_block_size is 128: Input should be a valid tuple"),
    ([], "quantization_config is []: not an object"),
    ({"quant_method": "gptq"}, "bits is missing: Field required"),
    (compressed(format=None), "config_groups.a.format is missing: Field required"),
    (group(weights=None, input_activations={"dynamic": True}), "config_groups.a.weights is missing"),
    (gptq(sym="yes"), "sym is 'yes': Input should be a valid boolean"),
    (gptq(group_size=0), "group_size is 0: neither -1"),
    (awq(group_size=-2), "group_size is -2: neither -1"),
    (compressed(config_groups={"a": ["Linear"]}), "config_groups.a is ['Linear']: Input should be"),
    (group(targets="Linear"), "config_groups.a.targets is 'linear': Input should be a valid list"),
    (group(targets=["re:("]), "'re:(' is no pattern"),
    (weights(strategy="group"), "config_groups.a.weights.strategy is 'group': group_size is None, not a number"),
    (
        group(format="float-quantized", weights={"type": "float", "strategy": "block"}),
        "weights.strategy is 'block': block_structure does not give",
    ),
]


@pytest.mark.parametrize(("config", "message"), NOT_SUPPORTED)
def test_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    assert_refused(config, message, INSTEAD)


@pytest.mark.parametrize(("config", "message"), MISSPELT)
def test_what_makes_no_sense_is_named(config: Any, message: str) -> None:
    assert_refused(config, message, AFTERWARDS)


def assert_refused(config: Any, message: str, ending: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_scheme({"quantization_config": config})
    text = str(caught.value)
    assert text.startswith("config.json: quantization_config")
    assert message in text
    assert text.endswith(ending)


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"model_type": "llama"}])
def test_a_checkpoint_that_is_not_quantized_has_no_scheme(config: dict[str, Any]) -> None:
    assert find_scheme(config) is None


@pytest.mark.parametrize(
    "config",
    [
        compressed(sparsity_config={"format": "dense", "sparsity_structure": "2:4"}),
        compressed(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}),
        *(group(input_activations={"num_bits": 8} | said) for said in ({"dynamic": False}, {})),
        compressed(quantization_status="compressed", kv_cache_scheme=None, transform_config={}),
        gptq(dynamic={"-:.*gate": {}, "+:.*up": {"damp_percent": 0.1}}, meta={"quantizer": "gptqmodel:7"}),
        fp8(scale_fmt="ue8m0", modules_to_not_convert=["gate"], ignored_layers=None, activation_scheme="static"),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        awq(version="GEMM", modules_to_not_convert=["gate"]),
    ],
)
def test_what_changes_nothing_is_accepted(config: dict[str, Any]) -> None:
    assert find_scheme({"quantization_config": config}) is not None
