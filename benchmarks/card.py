"""The machine's card: the hardware and software that a figure was measured on."""

import os
import platform

import psutil
import torch
import transformers

import zinfer


def machine_card() -> dict[str, object]:
    """Hardware and versions, ready for JSON."""
    card: dict[str, object] = {
        "cpu_cores": os.cpu_count(),
        "host_memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "zinfer": zinfer.__version__,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        card["gpu"] = properties.name
        card["gpu_memory_gb"] = round(properties.total_memory / 1e9, 1)
        card["cuda"] = torch.version.cuda
    return card
