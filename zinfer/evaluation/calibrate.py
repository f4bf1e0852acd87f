"""Run a model in full precision over prompts and measure the inputs of its linear layers.

The result decides which columns of a weight need the most precision (`zinfer.kernels.scaling`). The model streams as in
any job; padding is not counted.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from zinfer.config import Settings
from zinfer.config.settings import Batch
from zinfer.engine.engine import InferenceEngine
from zinfer.errors import ConfigError
from zinfer.jobs.token_rows import by_length, padded, read_token_rows
from zinfer.model.build import build_meta_model
from zinfer.model.quantize import find_form
from zinfer.weights import Checkpoint
from zinfer.weights.slab_matrix import SlabMatrix

_MOST_TOKENS: Final = 4096  # per pass; the model streams once per pass
_SLICE_TOKENS: Final = 512  # squared at once


def measure_squares(model: Path, prompts: Path, settings: Settings) -> dict[str, torch.Tensor]:
    """Return the mean square of each input column of the layers whose weights the settings quantize.

    Args:
        model: checkpoint folder with its tokenizer.
        prompts: JSONL with rows like those of `zinfer run`.
        settings: device, budgets, and the weights to quantize.

    Returns:
        [columns] float32 on the CPU, by weight name; without layers that no prompt reached.

    Raises:
        ConfigError: a row is invalid; names its line.
        CheckpointError: like `zinfer.init_inference`.
    """
    tree = build_meta_model(Checkpoint.open(model), settings.dtype)
    batches = by_length(read_token_rows(prompts, model, tree, settings.max_out_tokens), len, _MOST_TOKENS)
    if not batches:
        raise ConfigError(f"{prompts}: no prompts to calibrate with")
    shape = Batch(max(map(len, batches)), max(len(row) for batch in batches for row in batch), 1)
    engine = InferenceEngine(model, replace(settings, quantization=None, batch=shape))
    options: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(type(tree).forward).parameters:
        options["logits_to_keep"] = 1
    try:
        seen = _Squares(engine.device)
        with seen.hooked(_layers(engine.module, settings)):
            for batch in batches:
                ids, mask = padded(batch)
                seen.expect(mask)
                engine(input_ids=ids, attention_mask=mask, **options)
        return seen.means()
    finally:
        engine.destroy()


def _layers(model: nn.Module, settings: Settings) -> dict[str, nn.Module]:
    """Return the linear layers whose weights get column scales, by weight name."""
    form = find_form(settings.quantization, scales_columns=True)
    found: dict[str, nn.Module] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = model.get_submodule(name.rpartition(".")[0])
        place = form(name, module, parameter)
        if isinstance(place, SlabMatrix) and place.format.scales_columns:
            found[name] = module
    return found


class _Squares:
    """Sums of squares of the layers' inputs, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._num_tokens: Counter[str] = Counter()
        self._mask, self._num_in_mask = torch.ones(0), 0

    def expect(self, mask: torch.Tensor) -> None:
        """Set which positions of the next pass count, [rows, tokens]."""
        self._num_in_mask = int(mask.sum())
        self._mask = mask.to(self._device, torch.float32).reshape(-1)

    @contextmanager
    def hooked(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        hooks = [module.register_forward_pre_hook(partial(self._note, name)) for name, module in layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def means(self) -> dict[str, torch.Tensor]:
        return {name: (total / self._num_tokens[name]).cpu() for name, total in self._sums.items()}

    def _note(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        flat = args[0].detach().reshape(-1, args[0].shape[-1])
        if len(flat) != len(self._mask):
            return  # rows are not tokens: an expert layer behind a router, where the mask does not apply
        slices = [slice(begin, begin + _SLICE_TOKENS) for begin in range(0, len(flat), _SLICE_TOKENS)]
        total = torch.stack([self._mask[part] @ flat[part].float().square() for part in slices]).sum(0)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._num_tokens[name] += self._num_in_mask
