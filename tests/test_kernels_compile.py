"""The kernels compile to machine code for compute capability 9.0 without a GPU; what they do there, `gpu` tests see."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zinfer import kernels

_HASHES = """
import importlib, json, pkgutil, sys
import zinfer.kernels
names = [each.name for each in pkgutil.iter_modules(zinfer.kernels.__path__)]
modules = [importlib.import_module("zinfer.kernels." + name) for name in names]
from triton.runtime.jit import JITFunction
found = {
    f"{module.__name__}.{name}": function
    for module in modules
    for name, function in vars(module).items()
    if isinstance(function, JITFunction) and function.__module__ == module.__name__
}
print(json.dumps({name: found[name].cache_key for name in sorted(found, reverse=sys.argv[1] == "reversed")}))
"""


@pytest.mark.slow
def test_every_kernel_compiles_and_multiplies_on_tensor_cores(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kernel_compiling.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    children = [
        subprocess.Popen(
            [sys.executable, str(script), dtype],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        )
        for dtype in ("float16", "bfloat16")
    ]
    printed = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0], [errors for _, errors in printed]
    lines = [line.split() for output, _ in printed for line in output.splitlines()]
    kernels = {line[0] for line in lines}
    on_tensor_cores = {
        "_fused_kernel",
        "fragment_kernel",
        "fragment_kernel_of_chosen",
        "decoded_kernel",
        "grouped_kernel",
        "_int8_kernel",
        "_scaled_kernel",
        "_decode_kernel",
        "_prompt_kernel",
    }
    others = {
        "_decode_blocks_kernel",
        "_dequantize_kernel",
        "_fragments_kernel",
        "_sum_kernel",
        "_quantize_tokens",
        "_read_kernel",
        "_write_kernel",
        "_combine_kernel",
        "_norm_kernel",
        "_rotate_kernel",
        "_gated_kernel",
        "_activation_kernel",
        "_added_kernel",
        "_sum_over_peers",
        "_gemv_kernel",
        "_order_kernel",
        "_quarters_kernel",
        "_write_static_kernel",
    }
    assert kernels == on_tensor_cores | others
    assert not [line for line in lines if "in-flight" in line]
    weights_early = {"_gemv_kernel", "fragment_kernel"}  # what they load is written by no kernel
    for name, _, *found in lines:
        early = [each for each in found if each.startswith("early-")]
        assert early == (["early-ld"] if name in weights_early else []), (name, early)
        products = [each for each in found if each not in early]
        assert bool(products) == (name in on_tensor_cores), (name, products)


@pytest.mark.slow
def test_a_kernels_hash_does_not_depend_on_which_kernel_runs_first() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    children = [
        subprocess.Popen([sys.executable, "-c", _HASHES, order], stdout=subprocess.PIPE, text=True, env=environment)
        for order in ("sorted", "reversed")
    ]
    forward, backward = (json.loads(child.communicate()[0]) for child in children)
    assert forward == backward
    assert len(forward) > 50


def test_functions_that_kernels_call_are_hashed_with_those_that_they_call() -> None:
    for file in Path(kernels.__path__[0]).glob("*.py"):
        functions = [each for each in ast.parse(file.read_text()).body if isinstance(each, ast.FunctionDef)]
        lines = {each.name: each.lineno for each in functions}
        for caller in functions:
            if "device_function" in {ast.unparse(each) for each in caller.decorator_list}:
                names = {each.id for each in ast.walk(caller) if isinstance(each, ast.Name)}
                assert [name for name in names if lines.get(name, 0) > caller.lineno] == [], (file.name, caller.name)
