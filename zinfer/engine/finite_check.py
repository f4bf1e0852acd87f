"""Finds the first layer that outputs infinities or NaN, the signs of damaged weights and of overflow."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zinfer.errors import NonFiniteError
from zinfer.model.build import find_dtype

BEFORE: Final = "what comes before the first layer"
AFTER: Final = "what comes after the last layer (all layers gave finite numbers)"

_NEVER: Final = torch.iinfo(torch.int64).max


class Looks:
    """Checks activations in order, and keeps the first one with infinities or NaN for each row.

    A check reads an activation once on its device, without synchronizing.

    Args:
        num_rows: of the batch. An activation with another first dimension counts for all rows.
    """

    def __init__(self, num_rows: int = 1) -> None:
        self._num_rows = num_rows
        self._names: list[str] = []
        self._first_R: torch.Tensor | None = None  # index of the first bad check by row, on the device

    def add(self, name: str, hidden: torch.Tensor) -> None:
        """Enqueue a check of ``hidden`` [rows, ...]."""
        finite = torch.isfinite(hidden)
        is_by_row = self._num_rows > 1 and hidden.ndim > 0 and hidden.shape[0] == self._num_rows
        finite = finite.reshape(self._num_rows, -1).all(dim=1) if is_by_row else finite.all()
        if self._first_R is None:
            self._first_R = torch.full((self._num_rows,), _NEVER, device=hidden.device)
        first_R = self._first_R
        self._first_R = torch.where(finite.to(first_R.device), first_R, first_R.clamp(max=len(self._names)))
        self._names.append(name)

    def by_row(self) -> list[str | None]:
        """Return the name of the first bad activation of each row, None for finite rows; waits for the device."""
        if self._first_R is None:
            return [None] * self._num_rows
        return [None if number == _NEVER else self._names[number] for number in self._first_R.tolist()]

    def where(self) -> str | None:
        """As `by_row`, for the first row, which stands for the whole batch if ``num_rows`` is 1."""
        return self.by_row()[0]


class FiniteWatch:
    """Checks the activations of a module between `start` and `stop`.

    It checks the input of the first layer of each stack (the first argument, and others named as hidden states, such
    as an encoder's in a decoder), the output of each layer, and what the module returns: all floating tensors, also
    in tuples, lists and mappings, except those whose names end in "mask" or "loss".

    Args:
        module: the model.
        layers: its layers by name, in the model's order.
        num_rows: of the batch, to report each row separately; 1: report the batch as a whole.
    """

    def __init__(self, module: nn.Module, layers: Mapping[str, nn.Module], num_rows: int = 1) -> None:
        self._module = module
        self._layers = dict(layers)
        self._num_rows = num_rows
        self._handles: list[RemovableHandle] = []
        self._looks = Looks(num_rows)

    @property
    def is_on(self) -> bool:
        return bool(self._handles)

    def start(self) -> None:
        """Add the hooks that check activations; nothing to do if they are there."""
        if self.is_on:
            return
        entries = self._entries()
        for name, layer in self._layers.items():
            if name in entries:
                look = self._look_before(entries[name], layer)
                self._handles.append(layer.register_forward_pre_hook(look, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._look_after(name)))
        self._handles.append(self._module.register_forward_hook(self._look_at_all))

    def stop(self) -> None:
        """Remove the hooks and drop their results."""
        while self._handles:
            self._handles.pop().remove()
        self._looks = Looks(self._num_rows)

    def take(self) -> Looks:
        """Return the checks since the last call; a pass may be under way."""
        taken, self._looks = self._looks, Looks(self._num_rows)
        return taken

    def check(
        self,
        work: Callable[[], Any],
        device: torch.device,
        *,
        layers: bool,
        logits: bool = False,
        again: Callable[[], Any] | None = None,
    ) -> Any:
        """Run the work and return its result.

        Logits that are NaN or infinite stop it: sampling from them makes a CUDA device unusable for the process, and
        their argmax is a wrong token. Only each row's maximum at the last position is checked; sampling waits for it
        anyway.

        Args:
            device: where tokens are sampled.
            layers: check every layer from the start, instead of only after the logits are broken.
            logits: check the logits.
            again: repeats the work with hooks on layers; it samples the same tokens. None: the work cannot be
                repeated.

        Raises:
            NonFiniteError: the module output infinities or NaN; names the first layer that did, if layers were checked.
        """
        on_cuda = device.type == "cuda" and not layers
        state, device_state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None
        handle = self._module.register_forward_hook(_stop_at_broken_logits) if logits else None
        try:
            if layers:
                return self._watched(work)
            try:
                return work()
            except _NoTokenError:
                pass
            if again is not None:
                torch.set_rng_state(state)
                if device_state is not None:
                    torch.cuda.set_rng_state(device_state, device)
                self._watched(again)
        finally:
            if handle is not None:
                handle.remove()
        raise NonFiniteError(
            "the model gave logits that are NaN or infinite; set zinfer.check_finite to true to learn which layer gave "
            "the first"
        )

    def broken_rows(self, work: Callable[[], Any]) -> list[str | None]:
        """Run the work; return the name of the first bad activation of each row, None for finite rows.

        Floating tensors that the work returns are checked last.
        """
        found, looks = self._over(work)
        for tensor in floating_tensors(found):
            looks.add(AFTER, tensor)
        return looks.by_row()

    def _over(self, work: Callable[[], Any]) -> tuple[Any, Looks]:
        """Return the work's result and the checks made while it ran."""
        self.start()
        try:
            return work(), self.take()
        finally:
            self.stop()

    def _watched(self, work: Callable[[], Any]) -> Any:
        def settled() -> Any:
            try:
                return work()
            except _NoTokenError as error:
                return error

        found, looks = self._over(settled)
        where = looks.where() or (AFTER if isinstance(found, _NoTokenError) else None)
        if where is not None:
            raise NonFiniteError(
                f"infinities or NaN come first from {where}: its weights may be damaged, or {find_dtype(self._module)} "
                "too narrow for this model; try the dtype that it was trained in, or float32"
            )
        return found

    def _entries(self) -> dict[str, str]:
        """Return the first layer of each stack and a name for its input; an encoder-decoder has two stacks.

        The first layer of a stage of a pipeline may have other layers before it.
        """
        firsts: dict[str, str] = {}
        for name in self._layers:
            firsts.setdefault(name.rpartition(".")[0], name)
        _, _, number = next(iter(firsts.values()), "").rpartition(".")
        if len(firsts) == 1 and (number == "0" or not number.isdigit()):
            return dict.fromkeys(firsts.values(), BEFORE)
        return {name: f"what comes before {name}" for name in firsts.values()}

    def _look_before(self, said: str, layer: nn.Module) -> Any:
        names = list(inspect.signature(type(layer).forward).parameters)[1:]  # without self

        def look(layer: nn.Module, args: Any, kwargs: Any) -> None:
            given = dict(zip(names, args, strict=False)) | kwargs
            for place, (name, value) in enumerate(given.items()):
                if place == 0 or name.endswith("_states"):
                    for hidden in floating_tensors(value):
                        self._looks.add(said, hidden)

        return look

    def _look_after(self, name: str) -> Any:
        def look(layer: nn.Module, args: Any, output: Any) -> None:
            hidden = next(floating_tensors(output), None)  # others are masks, and weights of experts or attention
            if hidden is not None:
                self._looks.add(name, hidden)

        return look

    def _look_at_all(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in floating_tensors(output):
            self._looks.add(AFTER, tensor)


def floating_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating tensors of a module's output in order, without masks and losses.

    Masks may hold infinities, and a loss is NaN if all labels are ignored.
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if not str(name).endswith(("mask", "loss")):
                yield from floating_tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from floating_tensors(each)


class _NoTokenError(Exception):
    """A pass output logits that are NaN or infinite."""


def _stop_at_broken_logits(module: nn.Module, args: Any, output: Any) -> None:
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor) and not bool(logits[:, -1].amax(-1).isfinite().all()):
        raise _NoTokenError
