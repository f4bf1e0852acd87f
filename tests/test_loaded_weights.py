"""Ranks compare what they have loaded, so that copies of other weights are an error and not nonsense."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from engines import loaded
from ranks_support import run_ranks

from zinfer.errors import CheckpointError

IDS = torch.tensor([[2, 7, 90, 33, 12]])


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of two hosts: each has a copy of a model, the second also another one with equal headers."""
    folder = tmp_path_factory.mktemp("hosts")
    first, second = folder / "first", folder / "second"
    tiny_checkpoint("llama", first / "model", num_layers=2)
    shutil.copytree(first / "model", second / "model")
    tiny_checkpoint("llama", second / "other", num_layers=2, seed=5)
    return [first, second]


def config(home: Path, bits: int | None, parallel: dict[str, int]) -> dict[str, Any]:
    own: dict[str, Any] = {"device": "cpu", "parallel": parallel}
    if bits is not None:
        own["quantization"] = {"bits": bits}
    offload = {"device": "nvme", "nvme_path": str(home / "nvme")}
    return {"zero_optimization": {"offload_param": offload}, "zinfer": own}


def stored_in(home: Path) -> Path:
    (manifest,) = (home / "nvme").glob("*/zinfer_store.json")
    return manifest


def outcomes(rank: int, homes: list[Path]) -> list[Any]:
    """Logits, or what is said, of each start, with files of this rank's host."""
    home, found = homes[rank], list[Any]()

    def start(name: str, bits: int | None = None, parallel: dict[str, int] | None = None) -> None:
        try:
            with loaded(home / name, config(home, bits, parallel or {"zero": 2})) as engine:
                found.append(engine(IDS).logits.clone())
        except CheckpointError as error:
            found.append(str(error))

    start("model")
    start("model", 8)
    start("other" if rank else "model")
    start("other" if rank else "model", None, {"replicas": 2})
    if rank:  # as if the store had been written of other weights, or damaged together with its manifest
        manifest = json.loads(stored_in(home).read_text())
        manifest["blocks"][sorted(manifest["blocks"])[1]]["checksum"] = "0" * 32
        stored_in(home).write_text(json.dumps(manifest))
    start("model", 8)
    start("model")
    return found


def test_other_weights_on_a_rank_are_refused(homes: list[Path]) -> None:
    first, second = run_ranks(2, outcomes, homes)
    with loaded(homes[0] / "model", {"zinfer": {"device": "cpu"}}) as engine:
        wanted = engine(IDS).logits
    for found in (first, second):
        same, quantized, other, replicas, damaged, again = found
        assert torch.equal(same, wanted)
        assert torch.equal(again, wanted)
        assert torch.equal(quantized, first[1]), "stores of two folders are one"
        assert not torch.equal(quantized, wanted)
        for said in (other, replicas):
            assert "rank 1 on " in said
            assert f" has loaded {homes[1] / 'other'}, and rank 0 on " in said
            assert f"{homes[0] / 'model'}, which differ in the weights: give all ranks copies of the same model" in said
        assert f" has loaded {stored_in(homes[1]).parent}, and rank 0 on " in damaged
        name = sorted(json.loads(stored_in(homes[0]).read_text())["blocks"])[1]
        assert f"{stored_in(homes[0]).parent}, which differ in the bytes of {name}: " in damaged
