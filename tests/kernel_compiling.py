"""Compiles the Triton kernels for a GPU that this machine need not have. Run it as a script, without the interpreter,
with the name of a dtype.

It intercepts launches with tensors on the CPU, describes their arguments as Triton would, and compiles to machine code
with
Triton's assembler. Prints a line for each: kernel, bytes, tensor core instructions, memory accesses before it waits for
previous kernels, and whether products overlap that must not.
"""

import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from attention_cases import AttentionCase, attention_call
from kernel_cases import (
    FRAGMENTS,
    QWEN3_30B_A3B,
    TYPICAL,
    TYPICAL_PUBLISHED,
    Shape,
    random_choice,
    random_experts,
    random_input,
    random_matrix,
)

from zinfer.kernels import (
    activation,
    decode_attention,
    decode_blocks,
    dequantize,
    fragment_linear,
    fused_linear,
    gemv,
    grouped_linear,
    int8_linear,
    launching,
    norm,
    paged_attention,
    peer_sum,
    prompt_attention,
    quantize_tokens,
    read_pinned,
    rotary,
    scaled_linear,
    write_pages,
    write_static,
)
from zinfer.kernels import add as added
from zinfer.kernels import expert_routing as groups
from zinfer.kernels.quantized import QuantFormat

SEGMENTS = ((1, 1600), (40, 300))
ATTENTION = (
    AttentionCase(SEGMENTS, 64, 8, 128, 128),
    AttentionCase(SEGMENTS, 56, 8, 128, 128, 16, torch.bfloat16, torch.int8, window=256, sinks=True),
    AttentionCase(SEGMENTS, 8, 8, 80, 80, 64, torch.bfloat16, torch.float8_e4m3fn, softcap=30.0, alibi=True),
    AttentionCase(SEGMENTS, 16, 1, 576, 512, 64, torch.bfloat16, values_in_keys=True),
)
TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
KINDS = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}


class Compiled:
    """Stands for a kernel: a launch compiles it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Any:
        return self.compile

    def compile(self, *args: Any, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        values = dict(zip((parameter.name for parameter in self.kernel.params), args, strict=False)) | constants
        signature: dict[str, str] = {}
        known: dict[str, Any] = {}
        aligned: dict[tuple[int], list[list[object]]] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or value is True or is_one:
                signature[parameter.name], known[parameter.name] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                signature[parameter.name] = f"tensordesc<{KINDS[value.base.dtype]}{list(value.block_shape)}>"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name], aligned[(index,)] = f"*{KINDS[value.dtype]}", [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    aligned[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, known, aligned)
        found = triton.compile(source, target=TARGET, options=options)
        products = sorted(set(re.findall(r"wgmma\.mma_async|mma\.sync", found.asm["ptx"])))
        is_chosen = self.kernel.__name__ == "fragment_kernel" and values["chosen_ptr"] is not None
        print(
            self.kernel.__name__ + "_of_chosen" * is_chosen,
            len(found.asm["cubin"]),
            *products,
            *early_accesses(found.asm["ptx"], options.get("launch_pdl", False)),
            *(["in-flight"] if multiplies_from_written_registers(found.asm["ttgir"]) else []),
        )


def early_accesses(ptx: str, is_dependent: bool) -> list[str]:
    """What a kernel that may begin early does with memory before it waits for others; nothing for one that may not."""
    if not is_dependent:
        return []
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    accesses = re.findall(r"\b(?:ld|st|red|atom)\.(?:volatile\.|relaxed\.|acq_rel\.|gpu\.)*global", before)
    return sorted({"early-" + access.split(".")[0] for access in accesses}) if wait else ["early-end"]


def multiplies_from_written_registers(ttgir: str) -> bool:
    """Whether a product out of registers may be under way when the numbers of the next one come to them."""
    is_from_registers = re.search(r"warp_group_dot %.*?: tensor<[^>]*dot_op<", ttgir) is not None
    return is_from_registers and re.search(r"warp_group_dot_wait.*pendings = [1-9]", ttgir) is not None


def main(dtype: torch.dtype) -> None:
    stand_in()
    compile_products(dtype)
    compile_experts(dtype)
    compile_others(dtype)
    for case in ATTENTION:
        if case.dtype == dtype:
            call = attention_call(case, "cpu")
            paged_attention.paged_attention_kernel(call.query, call.pages, call.layout, call.rule)
            keys = torch.randn(7, case.kv_heads, case.head_dim, dtype=case.dtype)
            write_pages.write_pages_kernel(call.pages, keys, keys[..., : case.value_dim], torch.arange(7))


def stand_in() -> None:
    """Let launches compile, as for a GPU."""
    names = {
        decode_blocks: ["_decode_blocks_kernel"],
        dequantize: ["_dequantize_kernel", "_fragments_kernel"],
        fragment_linear: ["fragment_kernel"],
        fused_linear: ["_fused_kernel", "_sum_kernel"],
        int8_linear: ["_int8_kernel"],
        quantize_tokens: ["_quantize_tokens"],
        read_pinned: ["_read_kernel"],
        scaled_linear: ["_scaled_kernel"],
        write_pages: ["_write_kernel"],
        decode_attention: ["_decode_kernel", "_combine_kernel"],
        prompt_attention: ["_prompt_kernel"],
        norm: ["_norm_kernel"],
        rotary: ["_rotate_kernel"],
        activation: ["_activation_kernel", "_gated_kernel"],
        added: ["_added_kernel"],
        peer_sum: ["_sum_over_peers"],
        gemv: ["_gemv_kernel"],
        grouped_linear: ["decoded_kernel", "grouped_kernel", "_quarters_kernel"],
        groups: ["_order_kernel"],
        write_static: ["_write_static_kernel"],
    }
    for module, kernels in names.items():
        for name in kernels:
            mock.patch.object(module, name, Compiled(getattr(module, name))).start()
    mock.patch.object(launching, "is_dependent", return_value=True).start()
    mock.patch.object(fragment_linear, "_device_facts", return_value=((9, 0), 132)).start()


def compile_products(dtype: torch.dtype) -> None:
    for format in TYPICAL:
        matrix = random_matrix(format, 1024, 4096, dtype, "cpu")
        dequantize.dequantize_kernel(matrix)
        for tokens in (1, 16, 64):
            x, bias = random_input(Shape(tokens, 1024, 4096), dtype, "cpu")
            product = fragment_linear.fragment_linear if format.in_fragments else fused_linear.fused_linear
            product(x, matrix, bias)
    for format in TYPICAL_PUBLISHED:
        matrix = random_matrix(format, 1024, 4096, dtype, "cpu")
        dequantize.dequantize_kernel(matrix)
        for tokens in (1, 16, 64):
            x, bias = random_input(Shape(tokens, 1024, 4096), dtype, "cpu")
            if scaled_linear.can_scale(matrix):
                scaled_linear.scaled_linear(x, matrix, bias)
            elif fused_linear.can_fuse(matrix):
                fused_linear.fused_linear(x, matrix, bias)
    for kind, (_, values, nbytes) in decode_blocks.KINDS.items():
        decode_blocks.decode_blocks(
            kind, torch.zeros(64, nbytes, dtype=torch.uint8), torch.empty(64 * values, dtype=dtype)
        )
    for format in FRAGMENTS:
        matrix = random_matrix(format, 64, 256, dtype, "cpu")
        fragment_linear.fragment_linear(random_input(Shape(8, 64, 256), dtype, "cpu")[0], matrix)
    for columns in (4096, 4097):
        matrix = random_matrix(QuantFormat(8), 1024, columns, dtype, "cpu")
        x, bias = random_input(Shape(300, 1024, columns), dtype, "cpu")
        int8_linear.int8_linear_kernel(x, matrix, bias)


def compile_experts(dtype: torch.dtype) -> None:
    mixture = QWEN3_30B_A3B[0]
    turned = torch.empty(mixture.experts, mixture.columns, mixture.rows, dtype=dtype, device="meta").transpose(1, 2)
    codes = [random_experts(format, mixture, dtype, "meta") for format in TYPICAL]
    full = random_experts(None, mixture, dtype, "meta")
    asymmetric = random_experts(QuantFormat(8, 128, symmetric=False), mixture, dtype, "meta")
    cases = {4: (full, codes[0], codes[2], codes[3]), 1024: (codes[0], asymmetric), 4096: (turned, *codes, asymmetric)}
    for tokens, weights in cases.items():
        found = groups.Groups.of(random_choice(mixture, tokens, "cpu"), mixture.experts)
        groups.pair_order_kernel(found.chosen, mixture.experts)
        x = torch.zeros(tokens, mixture.columns, dtype=dtype)
        for weight in weights:
            grouped_linear.grouped_linear_kernel(x, weight, found, turned[:, :, 0])
    grouped_linear.decoded_linear(x, codes[0], found)
    for format in TYPICAL_PUBLISHED:
        weight = random_experts(format, mixture, dtype, "meta")
        if scaled_linear.can_scale(weight):
            scaled_linear.scaled_experts(x, weight, found)
        elif grouped_linear.can_step(weight):
            grouped_linear.grouped_linear_kernel(x, weight, found)
    chosen = random_choice(mixture, 4, "cpu").view(-1)
    for format in FRAGMENTS:
        weight = random_experts(format, mixture, dtype, "meta")
        fragment_linear.chosen_linear(x[:4], weight, chosen, mixture.rows, turned[:, :, 0])


def compile_others(dtype: torch.dtype) -> None:
    heads = torch.randn(1, 5, 9, 128, dtype=dtype).transpose(1, 2)
    rotary.rotate_kernel(heads, heads[:, :2], heads[:, 0], heads[:, 1])
    for tokens in (1, 2):
        x, weight = torch.randn(tokens, 1600, dtype=dtype), torch.randn(64, 1600, dtype=dtype)
        gemv.gemv(x, weight, weight[:, 0])
        added.added_kernel(x, x)
    addresses = torch.zeros(2, dtype=torch.int64)
    read_pinned.read_pinned(addresses, addresses.device)
    for count in (8192, 1 << 20):
        peer_sum.sum_over_peers(torch.zeros(count, dtype=dtype), addresses, addresses, 3, 1)
    length, arrivals = torch.tensor(5), torch.tensor(0, dtype=torch.int32)
    for tokens in (1, 300):
        new = torch.randn(2, tokens, 8, 128, dtype=dtype).transpose(1, 2)
        keys, values = torch.zeros(2, 8, 512, 128, dtype=dtype), torch.zeros(2, 8, 512, 80, dtype=dtype)
        write_static.write_static(keys, values, length, arrivals, new, new[..., :80])
    for width in (128, 8192):
        x = torch.randn(5, width, dtype=dtype)
        norm.norm_kernel(x, x[0], norm.NormKind(1e-6))
        norm.norm_kernel(x, x[0], norm.NormKind(1e-6, offset=1.0, centred=True), x[1])
    for name in activation.ACTIVATIONS:
        activation.gated_kernel(x, x, name)
        activation.activated_kernel(x, name)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]))
