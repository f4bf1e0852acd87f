"""Engines that write a store under their nvme_path, and the written store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zinfer


@contextmanager
def engine_of(
    model: Any,
    nvme_path: Path | None,
    section: dict[str, object] | None = None,
    *,
    home: str = "nvme",
    device: str = "cpu",
    **options: Any,
) -> Iterator[zinfer.InferenceEngine]:
    offload = {"device": home} | ({} if nvme_path is None else {"nvme_path": str(nvme_path)})
    ours: dict[str, object] = {"device": device} | ({} if section is None else {"quantization": section})
    engine = zinfer.init_inference(model, {"zero_optimization": {"offload_param": offload}, "zinfer": ours}, **options)
    try:
        yield engine
    finally:
        engine.destroy()


def start(model: Any, nvme_path: Path | None, section: dict[str, object] | None = None, **options: Any) -> None:
    """An engine that is made, and given back."""
    with engine_of(model, nvme_path, section, **options):
        pass


def only(nvme_path: Path) -> Path:
    """The one store there."""
    (store,) = nvme_path.iterdir()
    return store
