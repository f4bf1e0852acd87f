"""Casts models to a dtype: keeps parts in float32 as transformers does, and warns of float16 overflow."""

import logging
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Families trained in bfloat16, which overflow in float16. T5: transformers pull request 20287; Gemma: the model cards.
_OVERFLOWING: Final = frozenset(
    {"t5", "mt5", "umt5", "longt5", "switch_transformers", "t5gemma"}
    | {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "recurrent_gemma", "paligemma"}
)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters to this dtype, except those that transformers keeps in float32.

    Unlike `module.to`, this keeps the dtype of buffers of transformers' models, such as rotary frequencies. Buffers of
    a plain module are cast like its weights.
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
    """Cast back to float32 the parameters that transformers keeps in float32 in a model of this dtype."""
    kept = _kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        if kept.intersection(name.split(".")):
            parameter.data = parameter.data.float()


def warn_of_overflow(model: nn.Module, dtype: torch.dtype) -> None:
    """Log a warning if the dtype is float16 and the model's family is known to overflow in it."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if dtype == torch.float16 and model_type in _OVERFLOWING:
        log.warning(
            "dtype is float16, but %s models were trained in bfloat16 and are known to overflow in it: infinities, "
            "NaN or wrong text; set dtype to bf16, or leave it out: the checkpoint's own is the default",
            model_type,
        )


def _kept_in_float32(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Return the name parts of parameters that stay in float32, as transformers' models list them."""
    names: set[str] = set()
    if dtype == torch.float16:
        names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return frozenset(names)
