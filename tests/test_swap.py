"""Texts that had to make room, kept in a file where host memory has its share: equal tokens, counted bytes, faults."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_support import NUM_NEW, alone, by_ids, folder, prompts, token_bytes
from plan_support import rates

from zinfer import LLM, SamplingParams
from zinfer.kv_cache.swap import SwapPlace, SwapSpace
from zinfer.nvme.aligned import align_up
from zinfer.nvme.scratch import ScratchError
from zinfer.planning import kv_budget as budget
from zinfer.probe.rates import Rates

__all__ = ["alone", "folder", "prompts"]  # fixtures

PARAMS = SamplingParams(max_new_tokens=NUM_NEW)
PAGE_SIZE, NUM_PAGES = 4, 24


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Rates]:
    """The rates that an LLM finds: a disk that is much faster than computing."""
    found = [rates(disk_bytes_per_s=1e12, flops_per_s=1e9)]
    monkeypatch.setattr("zinfer.engine.estimator.known_rates", lambda *args: found[-1])
    return found


def small(folder: Path, nvme_path: Path, device: str = "cpu", **options: Any) -> LLM:
    """Few pages: texts are set aside all the time, and six pages of them lie in host memory at most."""
    config = {"zero_optimization": {"offload_param": {"nvme_path": str(nvme_path)}}}
    memory = NUM_PAGES * PAGE_SIZE * token_bytes(folder)
    return LLM(folder, config, device=device, kv_page_size=PAGE_SIZE, kv_cache_memory=memory, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_memory", [False, True])
def test_texts_from_the_disk_go_on_with_their_tokens(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    device: str,
    machine: list[Rates],
    tmp_path: Path,
    in_memory: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not in_memory:
        monkeypatch.setattr(budget, "_MOST_PARKED_BYTES", 0)
    with small(folder, tmp_path / "parked", device) as llm:
        assert llm.batching.most_swapped_in_memory == (6 if in_memory else 0)
        assert llm.batching.most_swapped_pages == llm.batching.most_swapped_in_memory + NUM_PAGES
        found = llm.generate(by_ids(prompts), PARAMS)
        stats = llm.stats()
        assert os.listdir(tmp_path / "parked") == []
        num_tokens = llm.num_tokens
    assert [each.token_ids for each in found] == alone
    place_bytes = align_up(PAGE_SIZE * token_bytes(folder))
    assert stats.swapped_bytes_written > 0
    assert stats.swapped_bytes_written % place_bytes == 0
    assert 0 < stats.swapped_bytes_read <= stats.swapped_bytes_written
    assert num_tokens == sum(map(len, prompts)) + (NUM_NEW - 1) * len(prompts), "nothing was computed twice"


def test_a_disk_that_is_slower_than_computing_is_left_alone(
    folder: Path, prompts: list[list[int]], alone: list[tuple[int, ...]], machine: list[Rates], tmp_path: Path
) -> None:
    machine.append(replace(machine[0], disk_bytes_per_s=1.0))
    with small(folder, tmp_path / "parked") as llm:
        found = llm.generate(by_ids(prompts), PARAMS)
        assert llm.num_tokens > sum(map(len, prompts)) + (NUM_NEW - 1) * len(prompts)
        assert llm.stats().swapped_bytes_written == 0
    assert [each.token_ids for each in found] == alone
    assert not (tmp_path / "parked").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["pwritev", "preadv", "fstatvfs"])
def test_a_disk_that_fails_ends_the_call_and_no_other(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    machine: list[Rates],
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = {"pwritev": errno.ENOSPC, "preadv": errno.EIO, "fstatvfs": errno.ENOSPC}[name]

    class Full:
        f_bavail, f_frsize = 0, 1

    def broken(*args: object) -> Any:
        if name == "fstatvfs":
            return Full
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(budget, "_MOST_PARKED_BYTES", 0)
    with small(folder, tmp_path) as llm:
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(os, name, broken)
                with pytest.raises(ScratchError) as failed:
                    llm.generate(by_ids(prompts), PARAMS)
            assert failed.value.errno == code
            assert str(tmp_path) in str(failed.value)
            found = llm.generate(by_ids(prompts), PARAMS)
            assert [each.token_ids for each in found] == alone
            # Once the file has grown it needs no more room.
            if name == "fstatvfs":
                break
        assert llm._cache.swap_space._kept == {}


@pytest.mark.slow
def test_a_call_that_was_cut_leaves_no_place_taken(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    machine: list[Rates],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = os.pwritev, 0

    def interrupted(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(budget, "_MOST_PARKED_BYTES", 0)
    with small(folder, tmp_path) as llm:
        monkeypatch.setattr(os, "pwritev", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(by_ids(prompts), PARAMS)
        file = llm._cache.swap_space._file
        assert file is not None
        assert len(file._free) == file._num_places
        assert [each.token_ids for each in llm.generate(by_ids(prompts), PARAMS)] == alone
        assert len(file._free) == file._num_places


@pytest.mark.parametrize("most_in_memory", [0, 5, None])
@pytest.mark.parametrize("at_once", [1, 3 * 4096, 1 << 20])
def test_pages_come_back_as_they_were(tmp_path: Path, most_in_memory: int | None, at_once: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randn((20, 30), generator=generator).half(),
        torch.randint(0, 255, (20, 50), generator=generator, dtype=torch.uint8),
        torch.randn((20, 7), generator=generator),
    ]
    before = [row.clone() for row in rows]
    parked = SwapSpace(rows, SwapPlace(most_in_memory, tmp_path, at_once))
    held = {1: [3, 4, 9], 2: [0, 19, 7, 6], 3: [11]}
    for number, pages in held.items():
        parked.swap_out(number, pages)
    for row in rows:
        row.zero_()
    parked.swap_in(2, [2, 3])
    parked.swap_in(1, [0, 1, 4])
    parked.swap_in(3, [])
    for row, old in zip(rows, before, strict=True):
        assert torch.equal(row[[2, 3, 0, 1, 4]], old[[7, 6, 3, 4, 9]])
        assert not row[5:].any()
    assert (parked.bytes_written > 0) == (most_in_memory is not None)
    parked.forget(1)
    parked.close()


def test_a_folder_that_cannot_be_used_is_told_at_once(folder: Path, machine: list[Rates], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ScratchError, match=str(tmp_path / "file")):
        small(folder, tmp_path / "file")
