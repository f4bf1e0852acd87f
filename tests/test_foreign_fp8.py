"""FP8 checkpoints run as they are published: blocks of e4m3 floats whose last may be cut, by rows, and by tensors."""

import json
import logging
from pathlib import Path
from typing import Any, Final

import published_formats
import pytest
import torch
from checkpoints import left_padded, random_prompts
from foreign_support import PARAMETER, assert_reads, read, scheme_of
from hypothesis import given
from hypothesis import strategies as st
from packed_cache_support import engine_of
from ragged_models import make_loud
from ranks_support import run_ranks
from safetensors.torch import load_file, save_file
from test_tensor_parallel import IDS, check_alike, computed, config, error_of
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel

import zinfer
from zinfer.errors import CheckpointError
from zinfer.model.outline import read_outline
from zinfer.weights.parameter import QuantizedParameter

E4M3: Final = torch.float8_e4m3fn
E8M0: Final = torch.float8_e8m0fnu
SHAPE: Final[dict[str, Any]] = {**published_formats.SHAPE, "hidden_size": 72, "intermediate_size": 100}
"""Widths that blocks cut."""
EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 1}
LATENT: Final = {"q_lora_rank": 40, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
GROUPS: Final = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": EXPERTS | GROUPS | LATENT | {"num_key_value_heads": 4, "head_dim": 8, "num_nextn_predict_layers": 1},
    "minimax_m2": {"intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "glm4_moe": EXPERTS | GROUPS,
}
STATIC: Final = {"activation_scheme": "static", "kv_cache_scheme": {"num_bits": 8}, "ignored_layers": ["lm_head"]}
LAYOUTS: Final[dict[str, tuple[str, tuple[int, int] | None, str, torch.dtype, dict[str, Any]]]] = {
    "blocks": ("fp8", (16, 16), "weight_scale_inv", torch.float32, {"modules_to_not_convert": ["lm_head", "gate"]}),
    "blocks of 128": ("fp8", (128, 128), "weight_scale_inv", torch.bfloat16, {"fmt": "float8_e4m3fn"}),
    "wide blocks of powers of two": ("fp8", (8, 32), "scale", E8M0, {"scale_fmt": "ue8m0"}),
    "tensors": ("fp8", (10**6, 10**6), "weight_scale", torch.float32, STATIC),
    "rows": ("fbgemm_fp8", (1, 10**6), "weight_scale", torch.float32, {"activation_scale_ub": 1200.0}),
}


def quantized(values: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, block by block."""
    rows, columns = values.shape
    codes = torch.empty(rows, columns, dtype=E4M3)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale = values[place].abs().max() / 448
            scales[i, j] = (2 ** scale.log2().ceil() if dtype == E8M0 else scale).to(dtype).float()
            codes[place] = (values[place] / scales[i, j]).clamp(-448, 448).to(E4M3)
    return codes, scales.to(dtype)


def spread(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """What codes and scales stand for, float64."""
    rows, columns = codes.shape
    each = scales.to(torch.float64).repeat_interleave(min(block[0], rows), 0)[:rows]
    return codes.to(torch.float64) * each.repeat_interleave(min(block[1], columns), 1)[:, :columns]


def write_fp8(folder: Path, family: str, layout: str, **shape: Any) -> PreTrainedModel:
    """A checkpoint as the layout says; returns transformers' model with the values that it stands for."""
    method, block, part, dtype, section = LAYOUTS[layout]
    torch.manual_seed(0)
    made = AutoConfig.for_model(family, **(SHAPE | FAMILIES[family] | shape))
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    make_loud(model)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    values = dict(stored)
    for name, value in values.items():
        if value.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight")):
            codes, scales = quantized(value, block, dtype)
            values[name] = spread(codes, scales, block).float()
            scales = scales[0, 0] if layout == "tensors" else scales
            module = name.removesuffix(".weight")
            stored |= {name: codes, f"{module}.{part}": scales.clone()}
            if layout == "tensors":
                stored |= {f"{module}.{each}": torch.tensor(0.5) for each in ("input_scale", "k_scale")}
    if family == "deepseek_v3":  # what predicts a further token
        stored |= {name.replace("layers.1.", "layers.2."): value.clone() for name, value in stored.items()}
        stored["model.layers.2.eh_proj.weight"] = torch.zeros(72, 144)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    full: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    full.generation_config.eos_token_id = None
    if "block" in layout:
        section = section | {"weight_block_size": list(block)}
    text = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    text |= {"quantization_config": {"quant_method": method, **section}}
    (folder / "config.json").write_text(json.dumps(text))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return full


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    block=st.one_of(st.none(), st.tuples(st.integers(1, 80), st.integers(1, 80))),
    scales=st.sampled_from(["blocks", "rows", "one"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, E8M0]),
    part=st.sampled_from(["weight_scale_inv", "weight_scale", "scale", "qscale_weight"]),
    seed=st.integers(0, 999),
)
def test_every_shape_is_read_exactly(
    rows: int, columns: int, block: tuple[int, int] | None, scales: str, dtype: torch.dtype, part: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    height, width = block or (128, 128)
    if scales == "rows":
        block, height, width = None, 1, columns
    elif scales == "one":
        height, width = rows, columns
    codes = (torch.randn(rows, columns, generator=generator) * 100).to(E4M3)
    grid = (torch.rand(-(-rows // height), -(-columns // width), generator=generator) + 0.1).to(dtype)
    section = {} if block is None else {"weight_block_size": list(block)}
    matrix = read(scheme_of("fp8", **section), {"weight": codes, part: grid}, torch.float32)
    assert_reads(matrix, spread(codes, grid, (height, width)))


@given(
    weight=st.lists(st.integers(0, 40), max_size=3),
    scale=st.lists(st.integers(0, 40), max_size=3),
    block=st.one_of(st.none(), st.tuples(st.integers(1, 30), st.integers(1, 30))),
)
def test_damaged_shapes_are_refused_in_a_sentence(
    weight: list[int], scale: list[int], block: tuple[int, int] | None
) -> None:
    height, width = block or (128, 128)
    scheme = scheme_of("fp8", **({} if block is None else {"weight_block_size": list(block)}))
    shapes = {"weight": tuple(weight), "weight_scale_inv": tuple(scale)}
    fitting: list[list[int]] = [[], [1], [1, 1]]
    if len(weight) == 2:
        fitting.append([-(-weight[0] // height), -(-weight[1] // width)])
        fitting += [[weight[0], 1], [weight[0]]] if block is None else []
    if len(weight) == 2 and scale in fitting:
        assert scheme.format_of(PARAMETER, shapes)[1:] == (*weight,)
        return
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight.* has shape .*; download both again"):
        scheme.format_of(PARAMETER, shapes)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"weight": torch.zeros(32, 32)}, "weight is torch.float32, not torch.float8_e4m3fn: quantization_config"),
        ({"weight": torch.zeros(32, 32, dtype=torch.int8)}, "weight is torch.int8, not torch.float8_e4m3fn"),
        (
            {"weight_scale_inv": torch.ones(2, 2, dtype=torch.uint8)},
            "weight_scale_inv is torch.uint8, not torch.float16",
        ),
        ({"scale": torch.ones(2, 2)}, "up_proj has both weight_scale_inv and scale: remove one of them"),
    ],
)
def test_damaged_values_are_named(parts: dict[str, torch.Tensor], message: str) -> None:
    whole = {"weight": torch.zeros(32, 32).to(E4M3), "weight_scale_inv": torch.ones(2, 2)}
    with pytest.raises(CheckpointError) as refused:
        read(scheme_of("fp8", weight_block_size=[16, 16]), whole | parts)
    assert message in str(refused.value)


def test_bytes_are_powers_of_two_where_the_config_says_so() -> None:
    scales = torch.tensor([[120, 127], [130, 126]], dtype=torch.uint8)
    codes = torch.ones(32, 32).to(E4M3)
    matrix = read(scheme_of("fp8", weight_block_size=[16, 16], scale_fmt="ue8m0"), {"weight": codes, "scale": scales})
    assert_reads(matrix, spread(codes, 2.0 ** (scales.double() - 127), (16, 16)))


CASES = [*((family, "blocks") for family in FAMILIES), *(("llama", layout) for layout in LAYOUTS if layout != "blocks")]
CASES += [("qwen3_moe", "blocks of 128"), ("qwen3_moe", "tensors"), ("deepseek_v3", "rows")]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_are_those_of_the_values(family: str, layout: str, tmp_path: Path) -> None:
    """Resident, in host memory and on disk; the real block is larger than some matrices and divides no width."""
    wide = {"hidden_size": 192, "intermediate_size": 320} if layout == "blocks of 128" else {}
    full = write_fp8(tmp_path / "model", family, layout, **wide)
    ids, mask = left_padded(random_prompts(4, seed=9))
    with torch.no_grad():
        wanted = {"logits": full(input_ids=ids, attention_mask=mask).logits}
    for home in ("none", "cpu", "nvme"):
        with engine_of(tmp_path / "model", tmp_path / "nvme" if home == "nvme" else None, home=home) as engine:
            held = [each for each in engine.module.parameters() if isinstance(each, QuantizedParameter)]
            assert home != "none" or held
            assert error_of({"logits": engine(input_ids=ids, attention_mask=mask).logits}, wanted) <= 1e-5, home


def published_bytes(folder: Path) -> int:
    """Of the parameters of a model: without layers that predict further tokens, static scales and buffers."""
    aside = ("input_scale", "k_scale", "e_score_correction_bias")
    stored = load_file(folder / "model.safetensors")
    used = (value for name, value in stored.items() if ".layers.2." not in name and not name.endswith(aside))
    return sum(value.nbytes for value in used)


@pytest.mark.parametrize("inject", [False, True], ids=["", "injected"])
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_pass_moves_just_the_published_bytes(family: str, layout: str, inject: bool, tmp_path: Path) -> None:
    """From the published file itself: nothing is written, and there is no folder where it could be."""
    hidden, width = (128, 256) if layout == "blocks of 128" else (80, 48)
    name = "intermediate_size" if family == "minimax_m2" else "moe_intermediate_size"
    even = {"hidden_size": hidden, name: width}  # blocks divide the rows of experts, as in published models
    full = write_fp8(tmp_path, family, layout, **({} if family == "llama" else even))
    before = sorted(path.name for path in tmp_path.iterdir())
    with torch.no_grad():
        wanted = {"logits": full(IDS).logits}
    with engine_of(tmp_path, None, home="nvme", replace_with_kernel_inject=inject) as engine:
        assert error_of({"logits": engine(IDS).logits}, wanted) <= 1e-5
        stats = engine.stats()
        assert stats.blocks_by_home["HOST"] == 0
        moved = stats.streamed_bytes_per_pass + stats.loaded_bytes
        assert moved == published_bytes(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


EVEN: Final[dict[str, dict[str, Any]]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "minimax_m2": {"hidden_size": 64, "intermediate_size": 32},
}
"""Widths that blocks divide: transformers dequantizes no others (`Fp8Dequantize`)."""


@pytest.mark.parametrize("layout", ["blocks", "wide blocks of powers of two"])
@pytest.mark.parametrize("family", EVEN)
def test_what_transformers_dequantizes_is_read(family: str, layout: str, tmp_path: Path) -> None:
    write_fp8(tmp_path, family, layout, **EVEN[family])
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    with torch.no_grad():
        wanted = {"logits": theirs.eval()(IDS).logits}
    with engine_of(tmp_path, None, home="none") as engine:
        assert error_of({"logits": engine(IDS).logits}, wanted) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_batches_have_the_tokens_of_the_values(family: str, tmp_path: Path) -> None:
    full = write_fp8(tmp_path, family, "blocks")
    prompts = random_prompts(5, seed=4)
    wanted = []
    for prompt in prompts:
        ids = full.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        wanted.append(tuple(ids[0, len(prompt) :].tolist()))
    options = {"max_new_tokens": 8, "temperature": 0.0}
    offload = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    with zinfer.LLM(tmp_path, offload, device="cpu", kv_cache_memory="2MB") as llm:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], zinfer.SamplingParams(**options))
    assert [tuple(each.token_ids) for each in found] == wanted


@pytest.mark.slow
def test_two_ranks_divide_blocks(tmp_path: Path) -> None:
    """Feed-forwards of 100 and 40 rows have six and two blocks of 16 and a cut one; heads of 16 rows are blocks."""
    names = ("llama", "qwen3_moe", "deepseek_v3")
    for name in names:
        shape = {"qk_nope_head_dim": 24, "v_head_dim": 16} if name == "deepseek_v3" else {}
        write_fp8(tmp_path / name, name, "blocks", **shape)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    one, two = ([(tmp_path / name, config(size), inputs) for name in names] for size in (1, 2))
    by_number = {"zinfer": {"device": "cpu", "parallel": {"expert": 2}}}
    one.append(one[1])
    two.append((tmp_path / "qwen3_moe", config(1) | {"tensor_parallel": {}} | by_number, inputs))
    alone = computed(0, one)
    several = run_ranks(2, computed, two)
    check_alike(several, alone, [*names, "qwen3_moe by experts"])
    for ranks in several:
        for at, found in enumerate(ranks):
            assert found[2].loaded_bytes < 0.75 * alone[at][2].loaded_bytes, two[at]


def test_scales_that_are_missing_or_have_no_weight_are_named(tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama", "blocks")
    whole = load_file(tmp_path / "model.safetensors")
    module = "model.layers.1.mlp.up_proj"
    for part, message in (
        ("weight_scale_inv", rf"{module}.weight at byte \d+ is torch.float8_e4m3fn, and no scale of it is stored"),
        ("weight", f"{module} has weight_scale_inv but no weight: the checkpoint is incomplete"),
    ):
        left = {name: value for name, value in whole.items() if name != f"{module}.{part}"}
        save_file(left, tmp_path / "model.safetensors", {"format": "pt"})
        for start in (read_outline, lambda folder: zinfer.init_inference(folder, device="cpu")):
            with pytest.raises(CheckpointError, match=f"{message}.*download it again"):
                start(tmp_path)


def test_static_scales_are_set_aside_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_fp8(tmp_path, "llama", "tensors")
    with caplog.at_level(logging.WARNING):
        read_outline(tmp_path)
    assert "static scales of activations or of the KV cache (28 tensors, model.layers.0" in caplog.text


def test_a_plan_streams_the_bytes_that_a_run_streams(tmp_path: Path) -> None:
    write_fp8(tmp_path, "deepseek_v3", "blocks")
    planned = sum(each.block.nbytes for each in read_outline(tmp_path).blocks if each.is_layer)
    with engine_of(tmp_path, None, home="cpu") as engine:
        assert engine.stats().streamed_bytes_per_pass == planned
