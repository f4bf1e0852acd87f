"""Runs a model in full precision over prompts and measures what its linear layers multiply with.

What it finds decides which columns of a weight have to come out the most exact (`zinfer.kernels.scaling`). The model
streams as it does in any job; positions behind a shorter prompt are not counted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from zinfer.config import Settings
from zinfer.engine import InferenceEngine
from zinfer.errors import ConfigError
from zinfer.jobs.token_rows import read_token_rows, right_padded
from zinfer.quantization.forms import find_form
from zinfer.quantization.slab_matrix import SlabMatrix

_BATCH_SIZE: Final = 16


def measure_squares(model: Path, prompts: Path, settings: Settings) -> dict[str, torch.Tensor]:
    """The mean square of each column of the inputs of the layers whose weights the settings quantize.

    Args:
        model: checkpoint folder with its tokenizer.
        prompts: JSONL, rows as `zinfer run` takes them.
        settings: device and budgets, and which weights are to be quantized.

    Returns:
        [columns] float32 on the CPU, by the weights' names; without layers that no prompt has reached.

    Raises:
        ConfigError: a row that is no prompt; names its line.
        CheckpointError: as `zinfer.init_inference`.
    """
    engine = InferenceEngine(model, replace(settings, quantization=None))
    try:
        rows = read_token_rows(prompts, model, engine.module, settings.max_out_tokens)
        if not rows:
            raise ConfigError(f"{prompts}: no prompts to calibrate with")
        seen = _Squares(engine.device)
        with seen.hooked(_layers(engine.module, settings)):
            for begin in range(0, len(rows), _BATCH_SIZE):
                ids, mask = right_padded(rows[begin : begin + _BATCH_SIZE])
                seen.expect(mask)
                engine(input_ids=ids, attention_mask=mask, use_cache=False)
        return seen.means()
    finally:
        engine.destroy()


def _layers(model: nn.Module, settings: Settings) -> dict[str, nn.Module]:
    """Linear layers whose weights get scales of columns, by the weights' names."""
    form = find_form(settings.quantization, scales_columns=True)
    found: dict[str, nn.Module] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = model.get_submodule(name.rpartition(".")[0])
        place = form(name, module, parameter)
        if isinstance(place, SlabMatrix) and place.format.scales_columns:
            found[name] = module
    return found


class _Squares:
    """Sums of squares, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._num_tokens: dict[str, int] = {}
        self._mask = torch.ones(0)
        self._num_in_mask = 0

    def expect(self, mask: torch.Tensor) -> None:
        """Which positions of the next pass count, [rows, tokens]."""
        self._num_in_mask = int(mask.sum())
        self._mask = mask.to(self._device, torch.float32)

    @contextmanager
    def hooked(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        handles = [module.register_forward_pre_hook(self._noting(name)) for name, module in layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def means(self) -> dict[str, torch.Tensor]:
        return {name: (total / self._num_tokens[name]).cpu() for name, total in self._sums.items()}

    def _noting(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            input = args[0]
            if input.numel() // input.shape[-1] != self._mask.numel():
                return  # not a row a token: a layer behind a router, which sees no mask
            squares = input.detach().reshape(-1, input.shape[-1]).float().square()
            total = self._mask.reshape(-1) @ squares
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._num_tokens[name] = self._num_tokens.get(name, 0) + self._num_in_mask

        return note
