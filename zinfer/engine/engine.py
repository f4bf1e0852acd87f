"""`InferenceEngine`: runs a model's own forward and `generate` while its weights stream."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.config import Settings
from zinfer.engine.call_args import can_repeat, looks_at_logits, moved
from zinfer.engine.finite_check import FiniteWatch
from zinfer.engine.streamed_model import StreamedModel, collect_dropped
from zinfer.errors import ConfigError
from zinfer.graphs.forward_graphs import GraphCounts
from zinfer.model.build import find_dtype
from zinfer.model.context_length import check_forward, check_generate
from zinfer.planning.memory import Request
from zinfer.planning.step_time import Prediction


class AroundModule(nn.Module):
    """Wraps another module: missing attributes are looked up there, and its weights cannot be moved or cast."""

    module: PreTrainedModel
    device: torch.device

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
        return getattr(self.module, name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "AroundModule":
        """Raise ConfigError if `to`, `cuda`, `half` etc. would move or cast the weights."""
        dtype = find_dtype(self.module)
        after = fn(torch.empty(0, dtype=dtype, device=self.device))
        if after.device != self.device or after.dtype != dtype:
            raise ConfigError(
                f"the engine computes on {self.device} in {dtype}, and its weights stay where the plan has put them; "
                "state zinfer.device and dtype in the configuration instead of moving or casting it"
            )
        return self


class InferenceEngine(AroundModule, StreamedModel):
    """A model whose weights stream while it runs; made by `zinfer.init_inference`.

    It has the attributes of `StreamedModel`; others, such as `engine.config`, are looked up in its module. The weights
    stream until `destroy`, or until neither the engine nor its module is referenced.

    Concurrent calls of `generate` and `forward` wait for each other.
    """

    def __init__(self, model: str | os.PathLike[str] | nn.Module, settings: Settings, **options: Any) -> None:
        """As `zinfer.init_inference`, with resolved settings; options as for `StreamedModel`."""
        if isinstance(model, AroundModule) and any(each.is_meta for each in model.parameters()):
            raise ConfigError(
                "model: is an engine already, whose weights stream; call it as it is, or destroy it and give the "
                "folder or a module with its weights"
            )
        # Such a module has its own weights back where the engine is dropped.
        has_weights = isinstance(model, nn.Module) and not any(each.is_meta for each in model.parameters())
        nn.Module.__init__(self)
        collect_dropped()
        StreamedModel.__init__(self, model, settings, **options)
        if not has_weights:
            # Scripts keep the module alone (`model = engine.module`). A function, unlike the module, may be copied with
            # it.
            vars(self.module)["forward"].life = self._close

    def call(self, work: Callable[[], Any]) -> Any:
        """As `StreamedModel.call`; with other ranks it returns once the device is done, for they may fail until then.

        Raises:
            RankError: another rank failed.
        """
        found = StreamedModel.call(self, work)
        if self.ranks is not None and self._ended is not None:
            self._ended.synchronize()
            self.check_ranks()
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward without gradients; tensors in the arguments are moved to the device.

        Raises:
            NonFiniteError: `zinfer.check_finite` is set, and `FiniteWatch` found infinities or NaN.
            LengthError: the input and the cached tokens together exceed `max_out_tokens` or the model's positions.
        """

        def forward() -> Any:
            self.agree("forward", args, kwargs)
            check_forward(self.module, args, kwargs, self.settings.max_out_tokens)
            return self.module(*moved(args, self.device), **moved(kwargs, self.device))

        if not self.settings.check_finite:
            return self.call(forward)
        return self.call(lambda: self._watch().check(forward, self.device, layers=True))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' own `generate`: same arguments, same result, beams included.

        Raises:
            ConfigError: the module has no such method.
            LengthError: input and new tokens together exceed `max_out_tokens` or the model's positions; checked before
                any compute.
            NonFiniteError: the logits of a sequence are NaN or infinite. It names the first layer that produced such
                numbers; to find it, the call is computed once more.
        """
        work, repeats = self._generation(args, kwargs), can_repeat(args, kwargs)
        logits = looks_at_logits(kwargs, args[1] if len(args) > 1 else self.module.generation_config)
        again = self._acceleration.eagerly(work) or work if repeats else None
        layers, watch = self.settings.check_finite, self._watch()
        return self.call(lambda: watch.check(work, self.device, layers=layers, logits=logits, again=again))

    def generate_unchecked(self, *args: Any, **kwargs: Any) -> Any:
        """As `generate`, without the check of the logits, for a caller that checks each row itself."""
        return self.call(self._generation(args, kwargs))

    def find_broken(self, work: Callable[[], Any], num_rows: int) -> list[str | None]:
        """Return the name of the first source of infinities or NaN in each row of a batch; None for finite rows.

        ``work`` calls this engine; tensors that it returns are checked too.
        """
        with self._lock:
            return self._watch(num_rows).broken_rows(self._acceleration.eagerly(work) or work)

    def eagerly(self, work: Callable[[], Any], reason: str) -> Any:
        """Return the result of ``work``, which calls this engine, without replaying CUDA graphs.

        Args:
            reason: in `graphs.eager`.
        """
        with self._lock:
            return (self._acceleration.eagerly(work, reason) or work)()

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward call of the module from now on, for `model_times`.

        Args:
            use_cuda_events: on a CUDA device, record events instead of synchronizing twice per call.
        """
        self._acceleration.time_passes(use_cuda_events=use_cuda_events)

    def model_times(self) -> list[float]:
        """Return the milliseconds of each forward call of the module since the last `model_times`.

        Raises:
            NotProfiledError: `profile_model_time` was not called.
        """
        return self._acceleration.take_times()

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, object] | None = None) -> None:
        """Compile the layers' norms and feed-forwards with `torch.compile`; the first calls after it take long.

        Args:
            backend: of `torch.compile`.
            compile_kwargs: its other arguments.

        Raises:
            RuntimeError: `compile` was called before, or the engine was destroyed.
        """
        with self._lock:
            self._running()
            self._acceleration.compile(self.layers, backend, compile_kwargs or {})

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._acceleration.is_compiled

    @property
    def graphs(self) -> GraphCounts:
        """How many forwards were captured, replayed or run eagerly; all zero if `enable_cuda_graph` has no effect."""
        return self._acceleration.counts

    def predict(self, batch_size: int, prompt_len: int, new_tokens: int) -> Prediction:
        """Predict a `generate` of this shape on this machine: seconds a pass, tokens a second, the bottleneck.

        The rates are those of `zinfer probe` if it has run here. Otherwise the first call measures them roughly, in
        about a second. From then on `stats` reports shares of them.

        Args:
            batch_size: prompts.
            prompt_len: tokens of the longest of them.
            new_tokens: tokens generated for each.

        Raises:
            ConfigError: a number below 1, files that cannot be read, or a module that is not one of transformers'.
            PlanError: the model is no decoder that generates, or keeps a state whose size is not known.
        """
        return self.estimator.predict(Request(batch_size, prompt_len, new_tokens))

    def _generation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
        if not getattr(self.module, "can_generate", bool)():
            raise ConfigError(
                f"generate: a {type(self.module).__name__} has no such method; call the engine, which is its forward, "
                "or give a transformers model with a head that generates"
            )

        def generate() -> Any:
            self.agree("generate", args, kwargs)
            check_generate(self.module, args, kwargs, self.settings.max_out_tokens)
            return self._acceleration.generate(*moved(args, self.device), **moved(kwargs, self.device))

        return generate

    def _watch(self, num_rows: int = 1) -> FiniteWatch:
        return FiniteWatch(self.module, self.named_layers, num_rows)
