"""Builds the module tree of a model with parameters on the meta device, or checks one that was passed in.

The class is the one that `architectures` names in config.json. `OnDevice` is DeepSpeed's context manager to build a
module without its weights.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, cast

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from zinfer.config import Settings
from zinfer.config.listing import CheckpointListing
from zinfer.errors import CheckpointError, ConfigError
from zinfer.model.partition import check_classes, find_repeated
from zinfer.model.text_side import text_side
from zinfer.weights import Checkpoint
from zinfer.weights.checkpoint import TOKEN_KEYS, check_config, check_token_ids, read_config

log = logging.getLogger(__name__)

COMPUTE_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_FILLS: Final = frozenset(getattr(torch.ops.aten, name).default for name in ("normal_", "uniform_")) | {
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.zero_.default,
}
_ALIASES: Final = {"kimi_k2": "deepseek_v3"}
"""Types of models that transformers lacks, and those with the same layers."""
_MAX_BUFFER_SIZE: Final = 1 << 30
"""Elements; no model's buffers have so many."""


def build_meta_model(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None, *, is_whole: bool = False
) -> PreTrainedModel:
    """Build the model that the checkpoint's config.json describes, in evaluation mode.

    Args:
        checkpoint: an opened checkpoint.
        dtype: of parameters; None takes config.json's, else the one that most of the checkpoint's bytes have.
        is_whole: a multimodal model with all its sides, instead of the one for text alone.

    Non-persistent buffers (rotary frequencies) are in no checkpoint, so they are computed here, on the CPU. Python code
    in a checkpoint is never run.

    Raises:
        CheckpointError: transformers cannot build a model from config.json.
    """
    config = _load_config(checkpoint)
    config = config if is_whole else text_side(config)
    config.dtype = dtype or _checkpoint_dtype(config, checkpoint)
    try:
        with init_empty_weights(include_buffers=False), _SkipInit():
            model: PreTrainedModel = find_class(config)._from_config(config, dtype=config.dtype)
    except Exception as error:  # a bad file can make a constructor fail in any way
        raise CheckpointError(
            f"{checkpoint.config_path}: transformers {transformers.__version__} builds no model from it: "
            f"{_brief(error)}"
        ) from error
    restore_fp32_modules(model, config.dtype)
    if model.can_generate():
        _load_generation_config(model, checkpoint)
    model.name_or_path = str(checkpoint.folder)
    vars(model.config).pop("quantization_config", None)  # describes the files; save_pretrained writes full weights
    return model.eval().requires_grad_(False)


class _SkipInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips fills of meta tensors, which have no effect and take longer than the rest of the build.

    The largest parameters are made on the meta device at once: accelerate moves them there after they were allocated,
    and a layer's stacked experts may need more memory than there is.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _FILLS and args[0].is_meta:
            return args[0]
        if func is torch.ops.aten.empty.memory_format and math.prod(args[0]) > _MAX_BUFFER_SIZE:
            kwargs = {**(kwargs or {}), "device": torch.device("meta")}
        return func(*args, **(kwargs or {}))


def build_on_meta(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Build a class with parameters on the meta device, in evaluation mode; buffers are computed on the CPU."""
    with init_empty_weights(include_buffers=False), _SkipInit():
        model: PreTrainedModel = model_class(config)
    return model.eval()


def compute_buffers(model: nn.Module) -> None:
    """Replace buffers on the meta device by those computed from the model's config; a checkpoint may lack them.

    For a module that is not one of transformers', only allocate persistent buffers: they are in its checkpoint.

    Raises:
        ConfigError: a non-persistent buffer of such a module has no values.
    """
    if any(buffer.is_meta for buffer in model.buffers()):
        computed = _computed_buffers(model)
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = computed[f"{prefix}.{name}" if prefix else name]


def _computed_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, PreTrainedModel):
        return dict(build_on_meta(type(model), model.config).named_buffers())
    stored = model.state_dict().keys()
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in stored]
    if lost:
        raise ConfigError(
            f"model: the buffer {lost[0]} is on the meta device and in no checkpoint (persistent=False); build the "
            "module with its buffers, as under accelerate's init_empty_weights()"
        )
    return {name: torch.empty_like(buffer, device="cpu") for name, buffer in model.named_buffers()}


def report_device(model: nn.Module, device: torch.device) -> None:
    """Make ``model.device`` report the compute device; transformers would report a placeholder's meta device."""
    original = type(model)
    if not hasattr(original, "device"):
        return
    # transformers uses the class's qualified name to find which outputs (hidden states etc.) a model can record.
    name = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    model.__class__ = type(original.__name__, (original,), {**name, "device": property(lambda self: device)})


def _load_config(checkpoint: Checkpoint) -> transformers.PretrainedConfig:
    path = checkpoint.config_path
    members = read_config(path)
    check_config(path, members, len(checkpoint.tensors))
    check_token_ids(path, members, None, {})
    try:
        if (same := _ALIASES.get(str(members.get("model_type")))) is not None:
            config = CONFIG_MAPPING[same].from_dict({**members, "model_type": same})
        else:
            config = AutoConfig.from_pretrained(str(checkpoint.folder), local_files_only=True, trust_remote_code=False)
        vocabulary = _vocabulary(config)
        _drop_flash_attention(config)
    except Exception as error:  # as above
        raise CheckpointError(
            f"{path}: not a configuration that transformers {transformers.__version__} reads: {_brief(error)}"
        ) from error
    check_token_ids(path, members, *vocabulary)
    return config


def _vocabulary(config: transformers.PretrainedConfig) -> tuple[int | None, dict[str, object]]:
    """Return the size of the vocabulary, if stated, and the config class's default special tokens."""
    text = config.get_text_config()
    usual = type(text)()
    return getattr(text, "vocab_size", None), {key: getattr(usual, key, None) for key in TOKEN_KEYS}


def _drop_flash_attention(config: transformers.PretrainedConfig) -> None:
    """Ignore a flash attention setting: without the package, transformers would download a kernel."""
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        named = getattr(each, "_attn_implementation_internal", None)
        if isinstance(named, str) and named.startswith("flash"):
            log.warning("config.json: attn_implementation %s is not used here; attention takes its usual way", named)
            each._attn_implementation_internal = None


def _checkpoint_dtype(config: transformers.PretrainedConfig, checkpoint: Checkpoint) -> torch.dtype:
    """Return config.json's dtype, else the floating-point dtype of most of the checkpoint's bytes."""
    dtype = cast(torch.dtype | None, config.dtype)
    if dtype is None:
        nbytes: Counter[torch.dtype] = Counter()
        for entry in checkpoint.tensors.values():
            if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:  # narrower ones are codes and scales
                nbytes[entry.dtype] += entry.nbytes
        if not nbytes:
            raise CheckpointError(f"{checkpoint.folder}: the checkpoint holds no floating-point tensor")
        return nbytes.most_common(1)[0][0]
    if dtype not in COMPUTE_DTYPES:
        raise CheckpointError(
            f"{checkpoint.config_path}: dtype is {str(dtype).removeprefix('torch.')}, which layers do not compute in; "
            "state dtype in the configuration: fp32, fp16 or bf16"
        )
    return dtype


def _load_generation_config(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    path = checkpoint.folder / "generation_config.json"
    if path.is_file():
        check_token_ids(path, read_config(path), *_vocabulary(model.config))
        try:
            model.generation_config = GenerationConfig.from_pretrained(str(checkpoint.folder))
        except Exception as error:  # as above
            raise CheckpointError(f"{path}: not a generation config: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """Return an error's type and the start of its text in one line; transformers lists every family it knows."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else f"{text[:400]} ..."


def find_model(
    model: str | os.PathLike[str] | Checkpoint | nn.Module, settings: Settings, part: Checkpoint | None = None
) -> tuple[PreTrainedModel, Checkpoint | None]:
    """Return the module tree, and the checkpoint that holds its weights; None if they are in memory.

    Args:
        model: as for `zinfer.init_inference`, or a checkpoint that is open already.
        settings: the resolved configuration.
        part: this rank's part of each layer, instead of the weights of ``model``.

    A module that is not one of transformers' is cast to that type; callers must not rely on its attributes.

    Raises:
        ConfigError: the model cannot be run, or it is not known where its weights are.
        CheckpointError: as `Checkpoint.open`.
    """
    if not isinstance(model, str | os.PathLike | Checkpoint | nn.Module):
        raise ConfigError(f"model: expected a folder, a hub name or a module, not {type(model).__name__}")
    if not isinstance(model, nn.Module):
        if settings.checkpoint is not None:
            folder = model.folder if isinstance(model, Checkpoint) else model
            raise ConfigError(f"checkpoint: the model is given as a folder ({folder}) already; remove one of the two")
        checkpoint = part or (model if isinstance(model, Checkpoint) else Checkpoint.open(model))
        tree = build_meta_model(checkpoint, settings.dtype, is_whole=settings.is_whole)
        if settings.generation_config == "none":
            _keep_token_ids(tree)
        check_classes(tree, settings.block_classes)
        _keep_scale(tree)
        return tree, checkpoint
    _check_module(model, settings)
    module = cast(PreTrainedModel, model.eval().requires_grad_(False))
    _keep_scale(module)
    if settings.dtype is not None:
        cast_parameters(module, settings.dtype)
    if settings.checkpoint is None:
        return module, None
    compute_buffers(module)
    if part is not None:
        return module, part
    if isinstance(settings.checkpoint, CheckpointListing):
        return module, Checkpoint.listed(settings.checkpoint.paths, settings.checkpoint.label)
    needs_config = isinstance(model, PreTrainedModel)
    return module, Checkpoint.open(settings.checkpoint) if needs_config else Checkpoint.of_weights(settings.checkpoint)


def _keep_token_ids(model: PreTrainedModel) -> None:
    """Drop what a generation config says beside the ids of special tokens."""
    if (own := getattr(model, "generation_config", None)) is not None:
        names = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(own, name) for name in names})


def _keep_scale(model: PreTrainedModel) -> None:
    """Turn off RWKV's rescaling, which divides weights in place at the first forward; streamed weights are constant."""
    base = getattr(model, "base_model", None)
    if getattr(base, "layers_are_rescaled", True) is False:
        model.config.rescale_every = 0


def _check_module(model: nn.Module, settings: Settings) -> None:
    name, is_plain = type(model).__name__, not isinstance(model, PreTrainedModel)
    names_layers = settings.block_classes or getattr(model, "_no_split_modules", None)
    if is_plain and not names_layers and not find_repeated(model):
        log.warning(
            "model: no ModuleList or Sequential in a %s repeats a class of modules that could stream as blocks, so all "
            "its weights stay on the device; to stream some, name their class: injection_policy={Block: ()}",
            name,
        )
    check_classes(model, settings.block_classes)
    if "forward" in vars(model):
        raise ConfigError(
            "model: its forward is wrapped already, by another engine or by accelerate; destroy that engine or remove "
            "those hooks, and pass a module with its weights"
        )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta and settings.checkpoint is None:
        raise ConfigError(f"model: {on_meta[0]} is on the meta device; say where its weights are: checkpoint=FOLDER")


def find_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that a model computes in: that of its first floating-point parameter."""
    own = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    return model.dtype if isinstance(model, PreTrainedModel) else own


_ENCODER_DECODERS: Final[tuple[Any, ...]] = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
_DECODERS: Final[tuple[Any, ...]] = (MODEL_FOR_CAUSAL_LM_MAPPING,)
# Masked language models first: the causal classes of such families are decoder variants, which few checkpoints hold.
_OTHERS: Final[tuple[Any, ...]] = (MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)


def find_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that ``config.architectures`` names, or the family's usual one if it names none.

    A name that transformers does not know is often a variant of the family's causal language model, which is then used
    instead; matching the weights shows whether it fits.

    Raises:
        ConfigError: transformers has no class for it.
    """
    names = list(config.architectures or ())
    for name in names:
        named: Any = getattr(transformers, name, None)
        is_model = isinstance(named, type) and issubclass(named, PreTrainedModel)
        if is_model and isinstance(config, named.config_class or ()):
            found: type[PreTrainedModel] = named
            return found
    if names:
        mappings = () if config.is_encoder_decoder else _DECODERS
    else:
        mappings = _ENCODER_DECODERS if config.is_encoder_decoder else _OTHERS
    for mapping in mappings:
        if type(config) in mapping:
            usual: Any = mapping[type(config)]
            found = usual[0] if isinstance(usual, tuple) else usual
            return found
    stated = f"architectures names {', '.join(names)}" if names else "architectures names no class"
    raise ConfigError(f"{stated}, and there is none for a {config.model_type} model; name one that transformers has")


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


_MAKERS: Final = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor})


class OnDevice(TorchFunctionMode):
    """Context manager that builds modules on a device and in a dtype; on the meta device they take no memory.

    Pass such a module to `zinfer.init_inference` together with ``checkpoint=``.

    Args:
        dtype: of floating-point tensors made without an explicit dtype; torch's default dtype, which transformers sets
            to the config's, is overridden.
        device: "meta", or any other.
        enabled: False: do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        super().__init__()
        self._dtype = dtype
        self._device = torch.device(device)
        self._enabled = enabled

    def __enter__(self) -> "OnDevice":
        if self._enabled:
            self._device.__enter__()
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            self._device.__exit__(kind, error, trace)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _MAKERS and (kwargs or {}).get("dtype") is None and made.is_floating_point():
            return made.to(self._dtype)
        return made
