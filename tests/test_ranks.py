"""Ranks share a model: each reads and keeps a part, and computes the same bits as a process that has all of it."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint, tiny_mixtral
from engines import config_for
from family_models import CASES, family_inputs, family_model, forward_inputs
from rank_engines import Job, check_equal, check_lost, computed, config, inputs_of
from ranks_support import Ranks, run_ranks
from transformers import AutoModelForCausalLM

import zinfer
from zinfer.errors import ConfigError, RankError
from zinfer.ranks.group import join_group
from zinfer.ranks.open_models import fail_models, failing_together
from zinfer.ranks.rank_watch import RankWatch

HOMES = ("cpu", "nvme", "none")
BITS = (None, 8, 4)
NUM_LAYERS = 8


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS, tie=False)


@pytest.fixture(scope="module")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A decoder whose embedding is the head's too, one with Conv1D, and a mixture."""
    mixture = tmp_path_factory.mktemp("mixtral")
    tiny_mixtral().save_pretrained(mixture)
    return [llama, tiny_checkpoint("gpt2", tmp_path_factory.mktemp("gpt2"), num_layers=3), mixture]


@DEVICES
def test_ranks_compute_the_bits_of_one_process(folders: list[Path], tmp_path: Path, device: str) -> None:
    llama, gpt2, mixtral = folders
    cases = [(llama, "cpu", 4), (gpt2, "nvme", None), (mixtral, "none", 8)]
    jobs: list[Job] = [(folder, config(homes, bits, device), {}) for folder, homes, bits in cases]
    some_bytes = sum(path.stat().st_size for path in llama.glob("*.safetensors")) * 3 // 4
    jobs.append((llama, config("none", device=device, most_device_bytes=some_bytes), {}))
    check_equal(jobs, 2, (3, 1))


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_all_homes_and_formats_compute_the_bits_of_one_process(
    folders: list[Path], tmp_path: Path, bits: int | None
) -> None:
    ways = [config(homes, bits, nvme_path=tmp_path if homes == "nvme" and bits else None) for homes in HOMES]
    check_equal([(folder, way, {}) for folder in folders for way in ways], 2, (1, 2))


@pytest.mark.slow
def test_four_ranks_compute_the_bits_of_one_process(folders: list[Path], tmp_path: Path) -> None:
    jobs: list[Job] = [
        (folder, config(homes, bits), {}) for folder in folders for homes, bits in (("cpu", 4), ("nvme", None))
    ]
    one_layer = tiny_checkpoint("llama", tmp_path, num_layers=1)  # fewer than ranks
    jobs += [(one_layer, config(homes), {}) for homes in HOMES]
    check_equal(jobs, 4, (1, 4, 2, 0))


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_every_class_computes_the_bits_of_one_process(tmp_path: Path, bits: int | None) -> None:
    ways = [config("cpu", bits), config("nvme", bits, nvme_path=tmp_path / "nvme" if bits else None)]
    jobs: list[Job] = []
    for family, class_name in CASES:
        model = family_model(family.model_type, class_name)
        model.save_pretrained(tmp_path / class_name)
        given = forward_inputs(model, family_inputs(model))
        jobs += [(tmp_path / class_name, way, given) for way in ways]
    check_equal(jobs, 2, (1, 2))


@pytest.mark.slow
@DEVICES
def test_each_rank_reads_and_keeps_its_part(llama: Path, tmp_path: Path, device: str) -> None:
    jobs: list[Job] = [(llama, config(homes, device=device), {}) for homes in HOMES]
    for bits in (8, 4):
        jobs.append((llama, config("cpu", bits, device), {}))
        jobs.append((llama, config("nvme", bits, device, nvme_path=tmp_path), {}))
    one = [stats for _, stats in computed(0, jobs, (2,))]
    most_bytes = one[2].device_bytes * 9 // 10
    divided: Job = (llama, config("none", device=device, most_device_bytes=most_bytes), {})
    two = run_ranks(2, computed, [*jobs[:2], divided, *jobs[3:], jobs[2]], (2, 2))
    assert [place for place, whole in enumerate(one) if whole.disk_bytes_per_pass] == [1, 4, 6]
    for place, whole in enumerate(one):
        shares = [found[place][1] for found in two]
        page_bytes = 4096 * len(os.listdir(llama)) * (NUM_LAYERS + 3)
        assert abs(sum(each.loaded_bytes for each in shares) - whole.loaded_bytes) <= page_bytes
        assert all(abs(each.loaded_bytes - whole.loaded_bytes / 2) <= page_bytes for each in shares)
        assert sum(each.streamed_bytes_per_pass for each in shares) == whole.streamed_bytes_per_pass
        assert sum(each.disk_bytes_per_pass for each in shares) == whole.disk_bytes_per_pass
        assert all(each.gathered_bytes > 0 for each in shares), "nothing came from the other rank"
        if whole.streamed_bytes_per_pass:
            half = whole.streamed_bytes_per_pass / 2
            assert all(abs(each.streamed_bytes_per_pass - half) <= 256 * NUM_LAYERS for each in shares)
            assert all(each.gathered_bytes >= 2 * half for each in shares), "two passes gather the other half twice"
    assert sum(found[0][1].host_bytes for found in two) <= 1.1 * one[0].host_bytes
    resident = two[0][2][1]
    assert resident.streamed_bytes_per_pass == 0
    assert resident.blocks_by_home["DEVICE"] == NUM_LAYERS + 3
    assert resident.device_bytes < 0.9 * one[2].device_bytes, "layers on the device are divided too"
    fitting = two[0][-1][1]
    rounded_bytes = 256 * 2 * (NUM_LAYERS + 3)
    assert 0 <= fitting.device_bytes - one[2].device_bytes < rounded_bytes, "where they fit, each rank has them all"
    assert fitting.loaded_bytes < 0.6 * one[2].loaded_bytes
    assert fitting.gathered_bytes == 0


def module_outputs(rank: int, folder: Path) -> torch.Tensor:
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = zinfer.init_inference(module, config("cpu"))
    try:
        with torch.no_grad():
            logits: torch.Tensor = engine(**inputs_of(rank)).logits
        return logits.clone()
    finally:
        engine.destroy()


@pytest.mark.slow
def test_a_module_in_memory_is_shared(llama: Path) -> None:
    for rank, logits in enumerate(run_ranks(2, module_outputs, llama)):
        assert torch.equal(logits, module_outputs(rank, llama))


def texts(rank: int, folder: Path, device: str) -> list[list[int]]:
    """Continuous batching of one row on rank 0 and nine on rank 1."""
    with zinfer.LLM(folder, config("cpu", device=device)) as llm:
        several = random_prompts(1 + 8 * rank, min_tokens=3, max_tokens=30, seed=rank)
        prompts = [{"prompt_token_ids": each} for each in several]
        params = zinfer.SamplingParams(max_new_tokens=12 - 7 * rank)
        return [list(each.token_ids) for each in llm.generate(prompts, params)]


@pytest.mark.slow
@DEVICES
def test_continuous_batching_needs_no_equal_passes(llama: Path, device: str) -> None:
    found = run_ranks(2, texts, llama, device)
    assert found == [texts(rank, llama, device) for rank in range(2)]
    assert len({token for row in found[1] for token in row}) > 8


def swapping(rank: int, folder: Path, nvme_path: Path) -> bool:
    """Whether sequences are swapped to disk, where the rates that rank 1 measures alone say so."""
    settings = config("cpu")
    settings["zero_optimization"]["offload_param"]["nvme_path"] = str(nvme_path)
    with (
        patch("zinfer.engine.estimator.PassEstimator.disk_spares_time", lambda self, token_bytes: rank == 1),
        zinfer.LLM(folder, settings) as llm,
    ):
        return llm.batching.swaps_to_disk


def test_ranks_swap_to_disk_or_none_does(llama: Path, tmp_path: Path) -> None:
    assert run_ranks(2, swapping, llama, tmp_path) == [False, False], "as rank 0 says"


def within_a_group(rank: int, folder: Path) -> list[list[int]]:
    """As `texts`, in a program that has connected the ranks itself."""
    torch.distributed.init_process_group("gloo")
    return texts(rank, folder, "cpu")


@pytest.mark.slow
def test_a_program_that_has_connected_the_ranks_is_joined(llama: Path) -> None:
    assert run_ranks(2, within_a_group, llama) == [texts(rank, llama, "cpu") for rank in range(2)]


def mixed(rank: int, folder: Path, settings: dict[str, Any], synchronous: bool) -> tuple[torch.Tensor, dict[str, int]]:
    settings["zinfer"]["synchronous"] = synchronous
    engine = zinfer.init_inference(folder, settings)
    try:
        with torch.no_grad():
            logits: torch.Tensor = [engine(**inputs_of(rank)).logits for _ in range(2 + rank)][-1]
        return logits.clone(), engine.stats().blocks_by_home
    finally:
        engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, True])
def test_blocks_from_disk_host_and_device_mix(llama: Path, synchronous: bool) -> None:
    settings = config_for(llama, "mixed", 3, "cpu")
    settings["zinfer"]["max_host_memory"] *= 2  # of both ranks
    alone, _ = mixed(0, llama, settings, synchronous)
    found = run_ranks(2, mixed, llama, settings, synchronous)
    assert torch.equal(found[0][0], alone)
    assert all(found[0][1][tier] > 0 for tier in ("HOST", "DISK")), found[0][1]
    assert found[0][1] == found[1][1], "the same plan"


@pytest.mark.sampled(4)
@DEVICES
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_ends_the_others(
    llama: Path, tmp_path: Path, lost: int, number: signal.Signals, device: str
) -> None:
    check_lost((llama, config("nvme", device=device), {}), tmp_path, lost, number)


def idle(rank: int, begun: Path, silence_s: float) -> str:
    """Computes nothing until another rank fails, or until it is told to leave."""
    failed = threading.Event()
    group = join_group("cpu")
    assert group is not None
    with patch("zinfer.ranks.rank_watch.SILENCE_S", silence_s):
        watch = RankWatch(group, "idle")
        watch.on_failure(lambda _: failed.set())
        (begun / str(rank)).touch()
        while not (failed.wait(0.1) or (begun / "over").exists()):
            pass
    if watch.failure is None:
        watch.leave(watch.connect(), all_hear=False)
    return str(watch.failure)


def failing_by_itself(rank: int) -> str:
    """Meets an error of its own, and leaves; rank 0 would wait an hour for one that has only to hear of it."""
    group = join_group("cpu")
    assert group is not None
    with patch("zinfer.ranks.rank_watch._HEARD_S", 3600):
        watch = RankWatch(group, "own")
        watch.fail(ConfigError(f"not with rank {rank}"))
        watch.leave(watch.connect(), all_hear=False)
    return str(watch.failure)


@pytest.mark.slow
def test_ranks_that_failed_by_themselves_are_not_waited_for() -> None:
    assert all("not with rank" in said for said in run_ranks(3, failing_by_itself)), "its own, or the first one's"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("lost", "told"), [(0, "is gone, which all ranks need"), (1, "ended or was killed")])
def test_a_lost_rank_is_missed_also_where_nothing_is_gathered(tmp_path: Path, lost: int, told: str) -> None:
    with Ranks(2, idle, tmp_path, 3600.0) as ranks:  # silence is no sign
        ranks.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        ranks.kill(lost)
        said = ranks.result_of(1 - lost)
    assert f"rank {lost}" in said
    assert told in said


@pytest.mark.slow
def test_a_job_that_is_stopped_and_goes_on_misses_no_rank(tmp_path: Path) -> None:
    with Ranks(2, idle, tmp_path, 5.0) as ranks:
        ranks.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        for rank in range(2):
            ranks.kill(rank, signal.SIGSTOP)
        time.sleep(7.0)
        for rank in range(2):
            ranks.kill(rank, signal.SIGCONT)
        time.sleep(2.0)
        (tmp_path / "over").touch()
        assert ranks.results() == ["None", "None"]


def paced(rank: int, folder: Path, num_calls: int) -> tuple[int, int]:
    """Equal numbers of calls after pauses that differ by rank.

    Returns the bytes gathered, and those of one pass.
    """
    service = "zinfer.engine.rank_service"
    engine = zinfer.init_inference(folder, config("cpu"))
    try:
        with patch(f"{service}._GAP_S", 60.0), patch(f"{service}._START_S", 60.0):  # no machine is too slow
            for _ in range(num_calls):
                time.sleep(0.01 + 0.04 * rank)
                engine(**inputs_of(rank))
        return engine.stats().gathered_bytes, engine.stats().streamed_bytes_per_pass
    finally:
        engine.destroy()


@pytest.mark.slow
def test_passes_stay_in_step_when_calls_have_pauses(llama: Path) -> None:
    num_calls = 8
    for gathered_bytes, pass_bytes in run_ranks(2, paced, llama, num_calls):
        assert num_calls <= gathered_bytes / pass_bytes < num_calls + 1, "what is read ahead, too"


def unreadable(rank: int, folder: Path, other: Path) -> None:
    """Rank 1 loads files that lack their last bytes."""
    zinfer.init_inference(other if rank == 1 else folder, config("cpu"))


@pytest.mark.slow
def test_a_rank_that_cannot_load_ends_the_others(llama: Path, tmp_path: Path) -> None:
    found = Ranks(2, unreadable, llama, tmp_path / "missing").results()
    assert found[1].kind == "CheckpointError"
    assert found[0].kind == "RankError"
    assert "rank 1" in found[0].text
    assert "CheckpointError" in found[0].text


def late(rank: int, folder: Path) -> list[str]:
    """What each of three models tells that a process opens after its job has failed, the last one in another job."""
    told = []
    with failing_together():
        fail_models(RankError(f"told to rank {rank}"))
        for _ in range(2):
            try:
                zinfer.init_inference(folder, config("cpu"))
            except RankError as error:
                told.append(str(error))
    with failing_together():
        zinfer.init_inference(folder, config("cpu")).destroy()
    return told


@pytest.mark.slow
def test_a_model_opened_after_its_job_has_failed_fails_too(llama: Path) -> None:
    for rank, told in enumerate(run_ranks(2, late, llama)):
        assert told == [f"told to rank {rank}"] * 2
