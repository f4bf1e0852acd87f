"""Times the host's work for a block of hardly any bytes: the cost of the hot path in the thread that runs the model."""

import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from homes import config_for
from passes import Passes
from transformers import OPTConfig, OPTForCausalLM

import zinfer
from zinfer.offload.streamer import Streamer
from zinfer.offload.transfer import Transfer

_NUM_LAYERS = 48
_ROUNDS = 3


class HotPath:
    """Seconds inside `wait` and `release`, those in which the thread waited for a move left out, and their number."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_blocks = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count while the context lasts."""
        watched: list[tuple[type, str]] = [(Streamer, "wait"), (Streamer, "release"), (Transfer, "wait")]
        originals = [getattr(owner, name) for owner, name in watched]
        try:
            for (owner, name), original in zip(watched, originals, strict=True):
                setattr(owner, name, self._timed(original, -1.0 if owner is Transfer else 1.0, name == "release"))
            yield
        finally:
            for (owner, name), original in zip(watched, originals, strict=True):
                setattr(owner, name, original)

    def _timed(self, original: Any, sign: float, ends_block: bool) -> Any:
        def timed(*args: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return original(*args)
            finally:
                self.seconds += sign * (time.perf_counter() - begin_s)
                self.num_blocks += ends_block

        return timed


def measure_overhead(folder: Path) -> dict[str, object]:
    """Microseconds a block: on the thread that runs the model, and what a whole pass takes longer than a resident one.

    The second is more, for the lanes' threads share the interpreter with that thread.
    """
    config = OPTConfig(
        hidden_size=64, ffn_dim=64, num_hidden_layers=_NUM_LAYERS, num_attention_heads=1, word_embed_proj_dim=64
    )
    OPTForCausalLM(config).half().save_pretrained(folder)
    seconds: dict[str, list[float]] = {"resident-100": [], "host": []}
    hot_path = HotPath()
    for _ in range(_ROUNDS):  # by turns: the first engine of a process is always slower
        for case, taken in seconds.items():
            engine = zinfer.init_inference(folder, config_for(folder, case))
            passes = Passes(engine, 1, 8)
            taken.append(statistics.median(passes.time(5, 60).decode_s))
            if case == "host":
                with hot_path.watched():
                    passes.time(5, 60)
            engine.destroy()
    shutil.rmtree(folder)
    resident_s, streamed_s = (min(taken) for taken in seconds.values())
    return {
        "resident_pass_s": round(resident_s, 6),
        "streamed_pass_s": round(streamed_s, 6),
        "hot_path_us_per_block": round(hot_path.seconds / hot_path.num_blocks * 1e6, 1),
        "pass_us_per_block": round((streamed_s - resident_s) / _NUM_LAYERS * 1e6, 1),
    }
