"""Builds a checkpoint's module tree without its weights: parameters on the meta device, computed buffers real."""

import json

import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from zinfer.checkpoint import Checkpoint
from zinfer.errors import CheckpointError


def build_meta_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The causal language model that the checkpoint's config.json describes, in evaluation mode.

    Args:
        checkpoint: an opened checkpoint.
        dtype: of parameters; None takes config.json's, else the one that most of the checkpoint's bytes have.

    Non-persistent buffers (rotary frequencies) are in no checkpoint, so they are computed here, on the CPU.

    Raises:
        CheckpointError: config.json names no causal language model that transformers knows.
    """
    config = _load_config(checkpoint)
    config.dtype = dtype or config.dtype or _commonest_dtype(checkpoint)
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.config_path}: transformers {transformers.__version__} builds no causal language model from "
            f"it: {error}"
        ) from error
    if (checkpoint.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(checkpoint.folder))
    model.name_or_path = str(checkpoint.folder)
    return model.eval().requires_grad_(False)


def report_device(model: PreTrainedModel, device: torch.device) -> None:
    """Let ``model.device`` say where it computes; transformers would name the meta device of a streamed parameter."""
    original = type(model)
    model.__class__ = type(original.__name__, (original,), {"device": property(lambda self: device)})


def _load_config(checkpoint: Checkpoint) -> transformers.PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(str(checkpoint.folder), local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{checkpoint.config_path}: not a configuration that transformers {transformers.__version__} reads: {error}"
        ) from error


def _commonest_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The floating-point dtype that most of the checkpoint's bytes have."""
    nbytes: dict[torch.dtype, int] = {}
    for entry in checkpoint.tensors.values():
        if entry.dtype.is_floating_point:
            nbytes[entry.dtype] = nbytes.get(entry.dtype, 0) + entry.nbytes
    if not nbytes:
        raise CheckpointError(f"{checkpoint.folder}: the checkpoint holds no floating-point tensor")
    return max(nbytes, key=lambda dtype: nbytes[dtype])
