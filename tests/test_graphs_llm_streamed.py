"""Passes of `zinfer.LLM` that are replayed while weights stream: numbers and bytes are as without."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import config_for, moved
from graph_support import stand_in
from llm_support import NUM_NEW, alone, by_ids, folder, prompts
from ragged_models import tiny_model

from zinfer import LLM, SamplingParams
from zinfer.batching.ragged import RaggedBatch
from zinfer.batching.runner import PassRunner
from zinfer.engine.streamed_model import StreamedModel
from zinfer.graphs.forward_graphs import FIRST
from zinfer.planning import pass_sizes

__all__ = ["alone", "folder", "prompts", "stand_in"]  # fixtures

pytestmark = pytest.mark.usefixtures("stand_in")

GREEDY = SamplingParams(max_new_tokens=NUM_NEW)
NUM_TEXTS = 3
HOST = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
LINK = "forwards stream so much that they wait for the link"
SETTLING = "streamed blocks are moving into their cache slots"


@pytest.fixture
def lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where texts need all pages: weights go on streaming."""
    monkeypatch.setattr(StreamedModel, "can_borrow", lambda self, memory: False)


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Of each pass."""
    found: list[torch.Tensor] = []
    plain = PassRunner.run

    def run(self: PassRunner, batch: RaggedBatch) -> torch.Tensor:
        found.append(plain(self, batch))
        return found[-1]

    monkeypatch.setattr(PassRunner, "run", run)
    return found


@contextmanager
def opened(folder: Path, config: Any, device: str, **extra: Any) -> Iterator[LLM]:
    options = {"enable_cuda_graph": True, "kv_cache_memory": "1MB", "speculate": "off", **extra}
    with LLM(folder, config, device=device, **options) as llm:
        yield llm


def streamed(folder: Path, homes: str, num_slots: int, device: str) -> dict[str, Any]:
    """The layers, whatever the cache leaves of the device."""
    return {**config_for(folder, homes, num_slots, device), "zinfer": {"num_slots": num_slots}}


def taken(logits: list[torch.Tensor]) -> list[torch.Tensor]:
    found = [each.clone() for each in logits]
    logits.clear()
    return found


CASES: list[Any] = [
    *(("host", num_slots, {}) for num_slots in (2, 3)),
    *(("disk", num_slots, {}) for num_slots in (2, 3)),
    ("host", 3, {"quantization": {"bits": 4, "group_size": 32}}),
    ("host", 3, {"quantization": {"bits": 8}, "replace_with_kernel_inject": True}),
    ("disk", 2, {"replace_with_kernel_inject": True}),
    ("host", 3, {"kv_cache_dtype": "int8"}),
]


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("lends_nothing")
@pytest.mark.parametrize(("homes", "num_slots", "extra"), CASES)
def test_logits_are_those_of_resident_weights(
    folder: Path,
    prompts: list[list[int]],
    logits: list[torch.Tensor],
    device: str,
    homes: str,
    num_slots: int,
    extra: dict[str, Any],
) -> None:
    found, counts = [], []
    for config in ({}, streamed(folder, homes, num_slots, device)):
        with opened(folder, config, device, **extra) as llm:
            for _ in range(2):
                llm.generate(by_ids(prompts[:NUM_TEXTS]), GREEDY)
            found.append(taken(logits))
            counts.append(llm.graphs)
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
    resident, streaming = counts
    assert resident.eager == streaming.eager
    assert resident.captured == streaming.captured == 2, "prompts and tokens"
    assert resident.replayed == streaming.replayed == 2 * NUM_NEW - 2
    assert (resident.pieces, streaming.pieces) == (2, 2 * (6 + num_slots * 5))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("lends_nothing")
@pytest.mark.parametrize(("homes", "num_slots"), [("host", 3), ("disk", 2)])
def test_bytes_moved_are_those_of_pythons_launches(
    folder: Path, prompts: list[list[int]], device: str, homes: str, num_slots: int
) -> None:
    seen = []
    for flag in (False, True):
        with opened(folder, streamed(folder, homes, num_slots, device), device, enable_cuda_graph=flag) as llm:
            for _ in range(2):
                llm.generate(by_ids(prompts[:NUM_TEXTS]), GREEDY)
            assert (llm.graphs.replayed > NUM_NEW) == flag
            stats = llm.stats()
            assert stats.passes == 2 * NUM_NEW
            seen.append(moved(llm._model))
    assert seen[0] == seen[1]
    # Those that come for a pass that is never begun are as many as there are slots at the most.
    assert seen[0][homes == "disk"] >= 2 * NUM_NEW * stats.streamed_bytes_per_pass


def test_tokens_are_those_alone_while_pages_are_lent(
    folder: Path, prompts: list[list[int]], alone: list[tuple[int, ...]], device: str
) -> None:
    """Blocks come to stay in pages that no text needs, and stream again where one does; forms know of it."""
    params = [SamplingParams(max_new_tokens=1 + number % NUM_NEW) for number in range(len(prompts))]
    with opened(folder, HOST, device, kv_page_size=8) as llm:
        for _ in range(3):
            found = llm.generate(by_ids(prompts[:2]), GREEDY)
            assert [completion.token_ids for completion in found] == alone[:2]
            for completion, wanted in zip(llm.generate(by_ids(prompts), params), alone, strict=True):
                assert completion.token_ids == wanted[: len(completion.token_ids)]
        counts, stats = llm.graphs, llm.stats()
        assert counts.eager[SETTLING] > 0, counts
        assert counts.replayed > NUM_NEW
        assert set(counts.eager) <= {SETTLING, FIRST}
        assert 0 < stats.bytes_to_device < stats.passes * stats.streamed_bytes_per_pass


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("lends_nothing")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("gpt2", marks=pytest.mark.slow),
        "bloom",
        pytest.param("gemma2", marks=pytest.mark.slow),
        "qwen3_moe",
        "deepseek_v2",
    ],
)
def test_families(family: str, tmp_path: Path, device: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    ids = by_ids([[5, 9, 17], [33, 4, 8, 12, 60, 2, 99]])
    with LLM(tmp_path, device=device, kv_cache_memory="2MB", enable_cuda_graph=False) as plain:
        wanted = [completion.token_ids for completion in plain.generate(ids, GREEDY)]
    with opened(tmp_path, HOST, device) as llm:
        for _ in range(2):
            assert [completion.token_ids for completion in llm.generate(ids, GREEDY)] == wanted
        if device == "cuda" and family == "bloom":  # it copies numbers from the host in its forward
            assert any("cannot be captured" in reason for reason in llm.graphs.eager), llm.graphs
        else:
            assert llm.graphs.replayed == 2 * NUM_NEW - 2, llm.graphs


@pytest.mark.slow
def test_a_call_that_fails_in_a_replay(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(folder, HOST, device) as llm:
        streamer = llm._model._runtime._streamer  # type: ignore[union-attr]
        assert streamer is not None
        for _ in range(2):
            llm.generate(by_ids(prompts[:1]), GREEDY)
        plain, num_waits = streamer.slot_of, 0

        def slot_of(block: Any) -> Any:
            nonlocal num_waits
            num_waits += 1
            if num_waits == 8:
                raise KeyboardInterrupt
            return plain(block)

        monkeypatch.setattr(streamer, "slot_of", slot_of)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(by_ids(prompts[:1]), GREEDY)
        assert [each.token_ids for each in llm.generate(by_ids(prompts), GREEDY)] == alone


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("most_bytes", "lends", "replays"), [(1 << 20, False, True), (100, False, False), (100, True, True)]
)
def test_by_default_where_python_would_be_slower_than_the_link(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    most_bytes: int,
    lends: bool,
    replays: bool,
) -> None:
    """Blocks that stay in pages stream no more."""
    monkeypatch.setattr(pass_sizes, "_MOST_STREAMED_BYTES", most_bytes)
    if not lends:
        monkeypatch.setattr(StreamedModel, "can_borrow", lambda self, memory: False)
    with LLM(
        folder, HOST, device=device, kv_cache_memory="2MB", replace_with_kernel_inject=False, speculate="off"
    ) as llm:
        for _ in range(2):
            assert llm.generate(by_ids(prompts[:1]), GREEDY)[0].token_ids == alone[0]
        assert (llm.graphs.replayed > 0) == replays, llm.graphs
        assert llm._runner.padded_sizes
        assert not llm._estimator.padded_sizes, "tokens of streamed weights are free beyond these"
        # The first pass streams in any case.
        assert (llm.graphs.eager[LINK] > 1) == (most_bytes == 100 and not lends), llm.graphs
