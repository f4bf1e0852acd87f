"""Graphs where settings, plan and device go with them, or the reason why not."""

import logging
from typing import Final

import torch

from zinfer.config import Settings
from zinfer.graphs.capturer import CudaCapturer
from zinfer.graphs.forward_graphs import ForwardGraphs
from zinfer.planning.placement import Plan

log = logging.getLogger(__name__)

_MOST_BYTES_A_BLOCK: Final = 64 << 20
"""Streamed in a pass, for each block of the model: the link takes more than a millisecond for them, and Python 0.6 to
launch a layer. Where more stream, passes wait for the link, launched by a graph or not."""


def open_graphs(
    plan: Plan, settings: Settings, device: torch.device, *, by_default: bool = False
) -> ForwardGraphs | None:
    """What the settings ask for; None where they do not, or where nothing can be replayed.

    Args:
        by_default: whether graphs are wanted where the settings say nothing of them, for forwards that they may make
            faster. That they were asked for in vain is a warning.
    """
    if not (by_default if settings.cuda_graph is None else settings.cuda_graph):
        return None
    capturer = capturer_for(device)
    if capturer is None:
        hindrance = "graphs need a CUDA device"
    elif settings.check_finite:
        hindrance = "zinfer.check_finite looks at every layer"
    elif settings.batching.kv_cache_tier == "host":
        hindrance = "the places of keys and values in host memory change"
    else:
        most_bytes = _MOST_BYTES_A_BLOCK * len(plan.homes) if settings.cuda_graph is None else None
        return ForwardGraphs(capturer, device, most_bytes)
    level = logging.WARNING if settings.cuda_graph else logging.DEBUG
    log.log(level, "enable_cuda_graph: %s; Python launches every forward", hindrance)
    return None


def capturer_for(device: torch.device) -> CudaCapturer | None:
    """What captures on a device."""
    return CudaCapturer() if device.type == "cuda" else None
