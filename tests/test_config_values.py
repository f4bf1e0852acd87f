"""Single values: sizes, counts, elements, dtypes."""

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinfer.config import Offload, resolve_settings
from zinfer.config.values import UNIT_BYTES, Unusable, count, elements, size_bytes
from zinfer.errors import ConfigError

UNITS = sorted(UNIT_BYTES)


@given(st.integers(1, 10**18))
def test_sizes_are_bytes_as_numbers_and_as_text(num_bytes: int) -> None:
    assert size_bytes(num_bytes) == size_bytes(str(num_bytes)) == size_bytes(f"{num_bytes} B") == num_bytes


@given(
    st.integers(1, 10**6), st.sampled_from(UNITS), st.sampled_from(["", " "]), st.sampled_from([str.upper, str.lower])
)
def test_sizes_multiply_their_unit_exactly(number: int, unit: str, gap: str, case: object) -> None:
    assert callable(case)
    assert size_bytes(f"{number}{gap}{case(unit)}") == number * UNIT_BYTES[unit]


@given(st.integers(1, 10**6), st.integers(0, 999), st.sampled_from(UNITS))
def test_fractions_of_a_unit_are_rounded_down_to_bytes(whole: int, thousandths: int, unit: str) -> None:
    exact = (whole + Fraction(thousandths, 1000)) * UNIT_BYTES[unit]
    assert size_bytes(f"{whole}.{thousandths:03}{unit}") == math.floor(exact)


@given(st.text(max_size=8))
def test_no_text_is_read_as_less_than_a_byte(text: str) -> None:
    try:
        num_bytes = size_bytes(text)
    except Unusable:
        assert not re.fullmatch(r"[1-9][0-9]*([kmgt]i?)?b", text, re.IGNORECASE | re.ASCII)
    else:
        assert num_bytes >= 1
        assert text.strip()[0] in "0123456789"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GB", 24 * 10**9), ("512MiB", 2**29), ("1.5GB", 15 * 10**8), ("2tib", 2**41), (24e9, 24 * 10**9)],
)
def test_sizes_as_people_write_them(text: object, num_bytes: int) -> None:
    assert resolve_settings({"zinfer": {"max_device_memory": text}}).memory.max_device_memory == num_bytes


@pytest.mark.parametrize(
    "value",
    [0, -1, "0GB", "-3GB", "24G", "lots", "", "GB", "1e9", "٣GB", 1.5, True, "0.1B", [1], float("nan"), math.inf],
)
@pytest.mark.parametrize("name", ["max_device_memory", "max_weight_memory", "max_host_memory", "max_pinned_memory"])
def test_nonsense_sizes_are_refused_with_an_example(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf'^zinfer\.{name} = .*: expected .*"24GB"'):
        resolve_settings({"zinfer": {name: value}})


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("24 GBs", 'did you mean "24GB"?'),
        ("24Gb", "Gb are bits, eight to a byte: write GB for bytes"),
        ("24Gib", "Gib are bits, eight to a byte: write GiB for bytes"),
        ("24G", 'did you mean "24GB" or "24GiB"?'),
        ("1,5 gigabytes", 'did you mean "1.5GB"?'),
        ("512 mebibytes", 'did you mean "512MiB"?'),
        ("512 MiBs", 'did you mean "512MiB"?'),
        ("9 bytes", 'did you mean "9B"?'),
        ("4K", 'did you mean "4kB" or "4KiB"?'),
        (0, "leave it out for the default"),
        ("0GB", "leave it out for the default"),
        ("-24GB", "leave it out for the default"),
        (-24, "leave it out for the default"),
    ],
)
def test_a_size_that_was_probably_meant_is_named(value: object, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^zinfer\.max_device_memory = .*; {re.escape(hint)}$"):
        resolve_settings({"zinfer": {"max_device_memory": value}})


@given(st.floats(0, 1e18))
def test_elements_are_rounded_down(number: float) -> None:
    assert elements(number) <= number < elements(number) + 1


def test_elements_take_floats_that_deepspeed_refuses() -> None:
    streaming = resolve_settings({"zero_optimization": {"stage3_prefetch_bucket_size": 0.9 * 4096**2}}).streaming
    assert streaming.prefetch_bucket_size == 15099494


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, "-1", "1e999", "1/2", "1_000", "", True, [1], {}])
def test_nonsense_elements_are_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^zero_optimization\.stage3_max_live_parameters = .*: expected a number of el"
    ):
        resolve_settings({"zero_optimization": {"stage3_max_live_parameters": value}})


@given(st.integers(-(10**400), 10**400))
def test_counts_of_any_length_are_read_or_refused(number: int) -> None:
    if number >= 1:
        assert count(1)(number) == number
    else:
        with pytest.raises(Unusable, match="of at least 1"):
            count(1)(number)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("num_slots", 0, "a whole number of at least 1"),
        ("num_slots", 2.5, "a whole number of at least 1"),
        ("max_out_tokens", "1k", "a whole number of at least 1"),
        ("synchronous", 2, "true or false"),
        ("device", "gpu", 'one of "auto", "cuda", "cpu"'),
        ("dtype", "float64", 'a torch dtype, "fp16", "bf16", "fp32" or "int8"'),
        ("dtype", 16, 'a torch dtype, "fp16", "bf16", "fp32" or "int8"'),
        ("checkpoint", 3, "a path, as text"),
        ("zinfer", 3, "an object {...}"),
    ],
)
def test_type_errors_name_path_value_and_what_is_expected(path: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{path} = .*: expected {re.escape(expected)}$"):
        resolve_settings(kwargs={path: value})


@pytest.mark.parametrize(
    ("section", "value", "expected"),
    [
        ({"stage": 4}, "stage = 4", "a whole number from 0 to 3"),
        ({"stage": "4"}, 'stage = "4"', "a whole number from 0 to 3"),
        ({"offload_param": {"device": "gpu"}}, 'offload_param.device = "gpu"', 'one of "none", "cpu", "nvme"'),
        ({"offload_param": {"pin_memory": "yes"}}, 'offload_param.pin_memory = "yes"', "true or false"),
        ({"offload_param": "cpu"}, 'offload_param = "cpu"', "an object {...}"),
        (
            {"offload_param": {"nvme_path": "~nobody-by-this-name/store"}},
            'offload_param.nvme_path = "~nobody-by-this-name/store"',
            "a path; `~name` must name an existing user",
        ),
    ],
)
def test_type_errors_in_sections(section: dict[str, object], value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_settings({"zero_optimization": section})
    assert str(refused.value) == f"zero_optimization.{value}: expected {expected}"


def test_values_that_deepspeed_takes() -> None:
    """Its sections are pydantic's, whose numbers and switches may be text, and whose switches may be numbers."""
    settings = resolve_settings(
        {
            "enable_cuda_graph": 0,
            "max_out_tokens": "2048",
            "fp16": {"enabled": "True"},
            "bf16": {"enabled": 0},
            "tensor_parallel": {"tp_size": "1"},
            "moe": {"enabled": 0},
            "zero_optimization": {
                "stage": "3",
                "stage3_prefetch_bucket_size": "1e9",
                "offload_param": {"device": "cpu", "pin_memory": 1, "buffer_count": "5", "buffer_size": "1e8"},
            },
            "aio": {"block_size": "1048576", "queue_depth": "8.0", "use_gds": "false"},
            "weight_quantization": {"quantized_initialization": {"num_bits": "4", "group_size": "64"}},
        }
    )
    assert settings.cuda_graph is False
    assert settings.max_out_tokens == 2048
    assert settings.dtype == torch.float16
    assert settings.streaming.prefetch_bucket_size == 10**9
    assert settings.offload == Offload(device="cpu", pin_memory=True, buffer_count=5, buffer_size=10**8)
    assert (settings.aio.block_size, settings.aio.queue_depth, settings.aio.use_gds) == (2**20, 8, False)
    assert settings.quantization is not None
    assert settings.quantization.rules[0].bits == 4
    assert resolve_settings(kwargs={"synchronous": 1}).synchronous
    assert resolve_settings({"mp_size": "2"}).parallel.tensor == 2
    assert resolve_settings({"ep_size": "2"}).parallel.expert == 2


def test_paths_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    offload = {"device": "nvme", "nvme_path": "~/store"}
    settings = resolve_settings({"zero_optimization": {"offload_param": offload}, "zinfer": {"trace": "~/trace.json"}})
    assert (settings.offload.nvme_path, settings.trace) == (tmp_path / "store", tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        *((name, torch.float16) for name in ("fp16", "half", "float16", "torch.float16", torch.half)),
        *((name, torch.bfloat16) for name in ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16)),
        *((name, torch.float32) for name in ("fp32", "float", "float32", "torch.float32", torch.float32)),
        ("auto", None),
        (None, None),
    ],
)
def test_dtype_spellings(spelling: object, dtype: torch.dtype | None) -> None:
    assert resolve_settings({"dtype": spelling}).dtype is dtype
    assert resolve_settings(kwargs={"dtype": spelling}).dtype is dtype
