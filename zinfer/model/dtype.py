"""Models whose numbers outgrow float16: parts that transformers keeps in float32, and families that are warned of."""

import logging
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Trained in bfloat16, whose numbers go 65,536 times as far. T5: transformers pull request 20287; Gemma: the models'
# own pages.
_OVERFLOWING: Final = frozenset(
    {"t5", "mt5", "umt5", "longt5", "switch_transformers", "t5gemma"}
    | {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "recurrent_gemma", "paligemma"}
)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters this dtype, except those that transformers keeps in float32 beside it.

    Not `module.to`: buffers of transformers' models, such as rotary frequencies, stay in their own dtype. Those of a
    plain module are cast as its weights are.
    """
    restore_fp32_modules(model, dtype)
    kept = _kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not kept.intersection(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    if not isinstance(model, PreTrainedModel):
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)


def restore_fp32_modules(model: nn.Module, dtype: torch.dtype) -> None:
    """Give float32 to the parameters that transformers keeps in it in a model of this dtype."""
    kept = _kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        if kept.intersection(name.split(".")):
            parameter.data = parameter.data.float()


def warn_of_overflow(model: nn.Module, dtype: torch.dtype) -> None:
    """Say in the log that a model of this family overflows in float16, if it is to compute in it."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if dtype == torch.float16 and model_type in _OVERFLOWING:
        log.warning(
            "dtype is float16, but %s models were trained in bfloat16 and are known to overflow in it: infinities, "
            "NaN or wrong text; set dtype to bf16, or leave it out: the checkpoint's own is the default",
            model_type,
        )


def _kept_in_float32(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Parts of parameters' names, as transformers' models list them: for float16, and for both narrow dtypes."""
    names: set[str] = set()
    if dtype == torch.float16:
        names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return frozenset(names)
