"""What `zinfer plan` says of a whole job: sizes that are as fast as it gets, and figures that add up."""

import contextlib
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from jobs_support import letters_model, write_rows
from plan_support import CONFIGS, SMALL_LLAMA, machine_with, outline_of, rates, search_less, write_config
from typer.testing import CliRunner, Result

from zinfer.cli import app
from zinfer.config import resolve_settings
from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.config.settings import Batching
from zinfer.errors import ConfigError, PlanError
from zinfer.model.outline import read_outline
from zinfer.planning.advice import job_advice
from zinfer.planning.job_estimator import PassTimes
from zinfer.planning.job_plan import Job, JobPlan, SizedJob, plan_sizes
from zinfer.planning.job_search import plan_forms, plan_job
from zinfer.planning.plan import Case
from zinfer.planning.presets import PRESETS
from zinfer.planning.simulation import Simulations, passes_of
from zinfer.planning.size_space import SizeSpace, spread
from zinfer.planning.trials import Trials
from zinfer.units import duration

SETTINGS = resolve_settings()
JOB = Job(5000, [100, 300, 500], [8, 16, 32])


@pytest.fixture(autouse=True)
def quick_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole search only where a test asks how fast the plan is."""
    if request.node.get_closest_marker("slow") is None:
        search_less(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("small"), SMALL_LLAMA)


@pytest.fixture(scope="module")
def planned(folder: Path) -> JobPlan:
    """With nothing stated."""
    with pytest.MonkeyPatch.context() as patch:
        search_less(patch)
        return plan_job(Case(outline_of(folder), machine_with(1_500_000_000, 10**10), SETTINGS), JOB)


def stated(**sizes: Any) -> Any:
    return replace(SETTINGS, batching=replace(Batching(), **sizes))


@pytest.mark.slow
def test_no_other_memory_or_tokens_are_faster_than_those_that_were_chosen(folder: Path) -> None:
    outline, machine = outline_of(folder), machine_with(2_000_000_000, 10**10)
    planned = plan_job(Case(outline, machine, SETTINGS), JOB)
    assert planned.batching.tokens_per_pass is not None
    num_compared = 0
    for other in (
        {"tokens_per_pass": planned.batching.tokens_per_pass * 2},
        {"tokens_per_pass": planned.batching.tokens_per_pass // 2},
        {"tokens_per_pass": 2048, "kv_cache_memory": 120_000_000, "max_sequences": 128},
    ):
        try:
            then = plan_job(Case(outline, machine, stated(**other)), JOB)
        except PlanError:
            continue
        assert planned.seconds <= then.seconds * 1.02
        num_compared += 1
    assert num_compared >= 2


def test_seconds_are_those_of_the_slowest_resource(folder: Path) -> None:
    """Of the 4,096 rows that share passes; a sample of them was simulated."""
    outline, machine = outline_of(folder), machine_with(1_050_000_000, 10**10)
    planned = plan_job(Case(outline, machine, SETTINGS), JOB)
    lengths = planned.job.prompt_lens, planned.job.new_tokens
    assert len(lengths[0]) < 4096
    num_tokens = 4096 * (sum(map(sum, lengths)) / len(lengths[0]) - 1)
    passes = planned.simulated.num_passes
    assert planned.simulated.tokens_per_pass * passes == pytest.approx(num_tokens, rel=0.01)
    params = sum(block.block.nbytes for block in outline.blocks if block.is_layer) / 2
    matrix_s = 2 * params * num_tokens / machine.rates.flops_per_s
    link_s = passes * planned.plan.streamed_bytes / machine.rates.link_bytes_per_s
    assert planned.simulated.seconds >= matrix_s  # fewer bytes may pass than that, once pages are lent to weights
    assert planned.simulated.seconds <= 2 * (matrix_s + link_s) + 1
    assert planned.seconds == pytest.approx(planned.simulated.seconds * 5000 / 4096)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("num_sequences", "kv_bytes", "error"),
    [(512, 300_000_000, 0.05), (3, 300_000_000, 0.05), pytest.param(64, 13_000_000, 0.1, id="cache of three rows")],
)
def test_a_sample_takes_as_many_passes_as_all_rows(
    folder: Path, num_sequences: int, kv_bytes: int, error: float
) -> None:
    """Also where a part of the cache would hold no row, and a part of the sequences would be less than one."""
    case = Case(outline_of(folder), machine_with(1_500_000_000, 10**10), stated(tokens_per_pass=4096))
    rows = Job(2048, [100, 300, 500] * 600, [16, 32, 64] * 600)
    sample = rows.sample(10_000)
    assert sample.scale > 5
    batching = replace(case.settings.batching, max_sequences=num_sequences, kv_cache_memory=kv_bytes)
    part = Simulations(sample.rows.prompt_lens, sample.rows.new_tokens, None, sample.scale)
    found = plan_sizes(case, batching, sample.rows, part)
    whole = rows.sample(10**9)
    assert whole.scale == 1
    expected = plan_sizes(case, batching, whole.rows, Simulations(whole.rows.prompt_lens, whole.rows.new_tokens, None))
    assert found.simulated.num_passes == pytest.approx(expected.simulated.num_passes, rel=error)
    assert found.seconds == pytest.approx(expected.seconds, rel=error)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", ["arrival", "longest_first"])
def test_the_longest_of_few_rows_counts(folder: Path, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in three hundred alone decides how many passes there are; a small sample leaves it out."""
    monkeypatch.setattr("zinfer.planning.job_search._FINAL_STEPS", 40_000)
    case = Case(outline_of(folder), machine_with(1_050_000_000, 10**10), stated(admission_order=order))
    place = 151
    job = Job(300, [100] * 300, [*[20 + i % 30 for i in range(place)], 400, *[20 + i % 30 for i in range(place, 299)]])
    assert 400 not in job.sample(3_000).rows.new_tokens
    planned = plan_job(case, job)
    assert planned.simulated.num_passes >= 400
    assert planned.seconds == pytest.approx(seconds_of_all_rows(planned, job))


def test_a_sample_has_its_share_of_each_length() -> None:
    draw = random.Random(0)
    rows = [(draw.randint(8, 600), min(int(draw.lognormvariate(3, 1)) + 1, 400)) for _ in range(900)]
    job = Job(900, *map(list, zip(*rows, strict=True)))
    found = job.sample(6_000).rows
    for some, whole in ((found.prompt_lens, job.prompt_lens), (found.new_tokens, job.new_tokens)):
        assert fmean(some) == pytest.approx(fmean(whole), rel=0.08)
        assert median(some) == pytest.approx(median(whole), rel=0.1)
    left = iter(rows)
    assert all(pair in left for pair in zip(found.prompt_lens, found.new_tokens, strict=True)), "in their order"


NUM_CASES, NUM_RIVALS = map(int, os.environ.get("ZINFER_PLANS", "5x60").split("x"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_no_other_sizes_are_clearly_faster(seed: int) -> None:
    """Of a model on a machine, with random settings of all sizes, in simulation."""
    rng = random.Random(seed)
    names = ("llama-3-8b", "opt-30b", "llama-3-70b", "mixtral-8x22b", "opt-175b", "qwen3-235b-a22b", "llama-3.1-405b")
    own: dict[str, Any] = {"optimize": rng.choice(["accuracy", "speed"])}
    if bits := rng.choice([None, 4, 8]):
        own["quantization"] = {"bits": bits, **({"group_size": 128} if bits == 4 else {})}
    settings = resolve_settings({"zinfer": own})
    outline = read_outline(Path(rng.choice(names)), settings.dtype, settings.quantization)
    case = Case(outline, PRESETS[rng.choice(list(PRESETS))], settings)
    prompt, new = rng.choice([(512, 32), (128, 128), (1600, 400), (64, 16)])
    count = rng.choice([64, 512, 4096, 20_000])
    each = range(min(count, 256))
    job = Job(count, [rng.randint(8, prompt) for _ in each], [rng.randint(1, new) for _ in each])
    try:
        plans = plan_forms(case, job)
    except PlanError:
        pytest.skip(f"{outline.name} does not fit {case.machine.name}")
    least_s, best_s = plans[0].seconds * 0.97, seconds_of_all_rows(plans[0], job)
    for _ in range(NUM_RIVALS):
        other = rng.choice(plans)
        sizes: dict[str, Any] = {
            "tokens_per_pass": int(2 ** rng.uniform(9, 17)),
            "max_sequences": int(2 ** rng.uniform(4, 12)),
            "kv_cache_memory": int(rng.random() * case.machine.device_memory_bytes) + 1,
            "admission_order": rng.choice(["arrival", "longest_first"]),
        }
        rows, simulations = other.job, other.simulations
        try:
            sized = SizedJob.of(other.case, replace(other.batching, **sizes), rows, simulations.window)
            then = sized.simulate(rows, simulations, least_s)
        except PlanError:  # it does not fit, or is certainly slower
            continue
        if then.seconds < least_s:  # but a sample may hold some numbers of sequences better than all
            told = f"{outline.name} on {case.machine.name}: {plans[0].keys()}, faster: {sizes}"
            assert best_s * 0.97 <= seconds_of_all_rows(then, job), told


def seconds_of_all_rows(planned: JobPlan, job: Job) -> float:
    """The seconds of a plan if all rows that share passes are simulated, not a sample of them."""
    rows = job.sample(sys.maxsize).rows
    simulations = Simulations(rows.prompt_lens, rows.new_tokens, planned.case.outline.spec.common_window)
    return plan_sizes(planned.case, planned.batching, rows, simulations).seconds


MIXED = Job(4096, [20 + 37 * i % 500 for i in range(256)], [1 + 13 * i % 60 for i in range(256)])
SEARCHED = [
    pytest.param("llama-3-8b", "a100-40gb", {}, id="resident"),
    pytest.param("opt-30b", "rtx3090", {"kv_cache_tier": "host"}, id="cache in host memory"),
    pytest.param("llama-3-70b", "rtx4090", {"kv_cache_dtype": "int8"}, id="streamed"),
]


def sized_at(name: str, machine: str, form: dict[str, str], count: int) -> list[tuple[SizedJob, Simulations]]:
    """The mixed job at so many points of the space that is searched, where it fits, and simulations of a sample."""
    settings = resolve_settings({"zinfer": {"quantization": {"bits": 4, "group_size": 128}, **form}})
    case = Case(read_outline(Path(name), settings.dtype, settings.quantization), PRESETS[machine], settings)
    space, simulations, found = SizeSpace(case, MIXED), MIXED.sample(3_000, 32).simulations(None), []
    for point in spread(count):
        with contextlib.suppress(PlanError):
            sized = SizedJob.of(case, space.sizes(point), MIXED, None)
            sized.check_longest(MIXED)
            found.append((sized, simulations))
    return found


@pytest.mark.parametrize(("name", "machine", "form"), SEARCHED)
def test_the_fastest_sizes_are_among_those_estimated_best(name: str, machine: str, form: dict[str, str]) -> None:
    found = sized_at(name, machine, form, 48)
    found.sort(key=lambda each: each[0].estimate_s(MIXED))
    seconds = [sized.simulate(MIXED, simulations).seconds for sized, simulations in found]
    assert len(found) > 30
    assert min(seconds[:8]) <= 1.03 * min(seconds) < 0.5 * max(seconds)


@pytest.mark.parametrize(("name", "machine", "form"), SEARCHED)
def test_all_passes_at_once_take_as_long_as_one_by_one(name: str, machine: str, form: dict[str, str]) -> None:
    """Also where pages are lent to weights, copied from host memory, and where passes are replayed."""
    for sized, simulations in sized_at(name, machine, form, 6):
        passes, times = simulations.under(sized.budget), PassTimes(sized.estimator)
        sizes = passes_of(run.times(passes.scale) for run in passes.own)
        expected = sum(times.next(size).seconds for size in sizes)
        assert sized.estimator.seconds_of(passes) == pytest.approx(expected, rel=0.001)


def test_sizes_that_are_estimated_clearly_slower_are_not_simulated() -> None:
    """Of a short job they are, since captures of its passes decide."""
    (fast, simulations), *_ = sized_at("llama-3-8b", "a100-40gb", {}, 3)
    for job, is_simulated in ((MIXED, False), (replace(MIXED, num_rows=64), True)):
        trials = Trials(fast.case, job.sample(3_000, 32), simulations)
        assert trials.find(replace(fast.batching, max_sequences=64)) is not None
        before = trials.num_steps
        trials.find(replace(fast.batching, max_sequences=8))
        assert (trials.num_steps > before) is is_simulated


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "new"), [(512, 128), (1600, 400)])
def test_a_long_job_is_predicted_by_enough_of_its_rows(prompt: int, new: int) -> None:
    """In a small part of the cache other numbers of sequences fit than in all of it: it told 14 % more seconds."""
    settings = resolve_settings({"zinfer": {"quantization": {"bits": 4, "group_size": 128}}})
    outline = read_outline(Path("llama-3-70b"), settings.dtype, settings.quantization)
    job = Job(4096, [prompt], [new])
    planned = plan_job(Case(outline, PRESETS["rtx4090"], settings), job)
    assert planned.seconds == pytest.approx(seconds_of_all_rows(planned, job), rel=0.04)


def test_a_plan_is_not_given_up_for_fewer_seconds_than_it_takes() -> None:
    """Passes that find weights in lent pages are shorter than those that copy them all."""
    settings = resolve_settings({"zero_optimization": {"offload_param": {"device": "cpu"}}})
    case = Case(read_outline(Path("opt-30b"), settings.dtype, settings.quantization), PRESETS["h200"], settings)
    job, num_lending = Job(64, [512] * 64, [32] * 64), 0
    for count in (2, 16, 64):
        sizes = replace(Batching(), kv_cache_memory=60 * 10**9, max_sequences=count, tokens_per_pass=2048)
        sized = SizedJob.of(case, sizes, job, None)
        expected = sized.simulate(job, Simulations(job.prompt_lens, job.new_tokens, None))
        new, other = (Simulations(job.prompt_lens, job.new_tokens, None) for _ in range(2))
        assert sized.simulate(job, new, expected.seconds * (1 + 1e-9)).seconds == expected.seconds
        copied_s = expected.simulated.num_passes * expected.plan.streamed_bytes / case.machine.rates.link_bytes_per_s
        num_lending += copied_s > expected.seconds
        with pytest.raises(PlanError, match="more than 0 passes"):
            sized.simulate(job, other, 0.0)
    assert num_lending


def test_what_is_stated_is_kept(folder: Path) -> None:
    sizes = {"tokens_per_pass": 777, "max_sequences": 33, "kv_cache_memory": 50_000_000, "kv_page_size": 16}
    planned = plan_job(Case(outline_of(folder), machine_with(1_500_000_000, 10**10), stated(**sizes)), JOB)
    budget = planned.budget
    assert (budget.tokens_per_pass, budget.max_sequences, budget.page_size) == (777, 33, 16)
    assert 49_000_000 < budget.footprint.kv_bytes <= 50_000_000
    assert planned.keys()["tokens_per_pass"] == 777


def test_the_keys_make_the_same_plan_again(planned: JobPlan) -> None:
    case = replace(planned.case, settings=resolve_settings({"zinfer": planned.keys()}))
    again = plan_job(case, JOB)
    assert again.budget == planned.budget
    assert again.seconds == planned.seconds


def test_what_does_not_fit_and_what_is_too_long_is_told(folder: Path) -> None:
    outline = outline_of(folder)
    with pytest.raises(PlanError):
        plan_job(Case(outline, machine_with(50_000_000, 10**10), SETTINGS), JOB)
    too_long = r"8000 tokens and 193 new ones are more than 8192 \(the model's positions\)"
    with pytest.raises(ConfigError, match=too_long):
        plan_job(Case(outline, machine_with(1_500_000_000, 10**10), SETTINGS), Job(9, [8000], [193]))


@pytest.mark.slow
def test_fewer_bytes_are_advised_where_the_link_is_slow(folder: Path) -> None:
    outline, machine = outline_of(folder), machine_with(910_000_000, 10**10, rates(link_bytes_per_s=2e9))
    planned = plan_job(Case(outline, machine, SETTINGS), JOB)
    assert planned.simulated.bottleneck == "link"
    advice = job_advice(planned, SETTINGS)
    assert any("zinfer.quantization" in each.change for each in advice)
    smaller = read_outline(folder, None, Quantization((QuantRule(bits=8),)))
    machine, sizes = machine_with(960_000_000, 10**10), stated(kv_cache_memory=46_000_000, tokens_per_pass=1024)
    planned = plan_job(Case(smaller, machine, sizes), JOB)
    assert planned.plan.streamed_bytes
    assert not any("quantization" in each.change for each in job_advice(planned, sizes))


def test_host_memory_holds_the_cache_where_the_device_holds_few_texts(folder: Path, tmp_path: Path) -> None:
    """Chosen where it is open, advised where the device was stated; not on a card that holds them all."""
    quarter = CONFIGS["Llama-3-70B"] | {"num_hidden_layers": 20}
    large, machine = outline_of(write_config(tmp_path, quarter)), machine_with(9 * 10**9, 64 * 10**9)
    job = Job(5000, [512], [32])
    sizes = stated(tokens_per_pass=4096, max_sequences=512)
    assert plan_job(Case(large, machine, sizes), job).budget.is_hosted
    sizes = stated(tokens_per_pass=4096, max_sequences=512, kv_cache_tier="device")
    planned = plan_job(Case(large, machine, sizes), job)
    assert planned.keys().get("kv_cache_tier") is None
    (words,) = (str(each) for each in job_advice(planned, sizes) if "kv_cache_tier" in each.change)
    keys = json.loads(words[words.index("{") : words.rindex("}") + 1])
    again = plan_job(Case(large, machine, resolve_settings(keys)), job)
    assert again.budget.is_hosted
    assert again.keys() == keys["zinfer"]
    assert again.budget.kv_bytes > 3 * planned.budget.kv_bytes
    assert again.budget.footprint.kv_bytes < again.budget.kv_bytes / 4
    assert f"{duration(again.seconds)}, {planned.seconds / again.seconds:.3g} times as fast" in words
    assert planned.seconds > 1.05 * again.seconds
    # What is stated is what the advice is for, and what is fast already is not advised against.
    assert not any("kv_cache_tier" in each.change for each in job_advice(again, resolve_settings(keys)))
    outline, machine = outline_of(folder), machine_with(10**10, 10**11)
    planned = plan_job(Case(outline, machine, SETTINGS), JOB)
    assert planned.keys().get("kv_cache_tier") is None
    assert not any("kv_cache_tier" in each.change for each in job_advice(planned, SETTINGS))


def test_pages_in_host_memory_cross_the_link_in_a_plan(folder: Path) -> None:
    outline = outline_of(folder)
    hosted = stated(kv_cache_tier="host", kv_cache_memory=2 * 10**9, tokens_per_pass=4096, max_sequences=512)
    fast, slow = (
        plan_job(Case(outline, machine_with(3 * 10**9, 10**11, rates(link_bytes_per_s=link)), hosted), JOB)
        for link in (1e12, 1e9)
    )
    assert fast.plan.streamed_bytes == 0, "all weights are at home on the device"
    assert slow.simulated.bottleneck == "link"
    assert slow.seconds > 2 * fast.seconds


def zinfer_plan(model: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--model", str(model), *options], env={"COLUMNS": "200"})


@pytest.mark.slow
def test_the_command_plans_a_job_of_a_config_alone(folder: Path, tmp_path: Path) -> None:
    options = ("--machine", "h200", "--rows", "1000000", "--prompt-len", "512", "--new-tokens", "32")
    result = zinfer_plan(folder, *options)
    assert result.exit_code == 0, result.output
    for words in ("1,000,000 rows of 512 tokens, 32 new ones each", "tokens a pass", "KV cache", "configuration"):
        assert words in result.stdout
    large = write_config(tmp_path, CONFIGS["Llama-3-70B"])
    found = json.loads(zinfer_plan(large, *options, "--json").stdout)
    assert found["rows"] == 1_000_000
    # 141 GB of weights, of which some stay on the device, over 55.5 GB/s; design: INT8 halves what crosses the link.
    assert found["bottleneck"] == "link"
    assert any('"bits": 8' in each for each in found["advice"])
    assert found["tokens_per_s"] == pytest.approx(32e6 / found["seconds"])
    assert 20e9 < found["streamed_bytes_per_pass"] < 141e9
    matrix_s = 1_000_000 * 543 * 2 * 68.5e9 / 790e12
    assert matrix_s < found["seconds"] < 1.8 * matrix_s


def test_the_configuration_is_the_given_one_with_what_was_chosen(tmp_path: Path) -> None:
    """As it stands it gives the same plan again: nothing of the file is lost, INT4 least of all."""
    folder, config = write_config(tmp_path / "model", SMALL_LLAMA), tmp_path / "ds.json"
    given = {
        "dtype": "fp16",
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "zinfer": {"quantization": {"bits": 4, "group_size": 128}, "tokens_per_pass": "auto", "check_finite": True},
    }
    config.write_text(json.dumps(given))
    options = (
        "--machine",
        "a6000",
        "--rows",
        "300",
        "--prompt-len",
        "50",
        "--new-tokens",
        "8",
        "--config",
        str(config),
    )
    printed = zinfer_plan(folder, *options)
    assert printed.exit_code == 0, printed.output
    (line,) = (line for line in printed.stdout.splitlines() if line.startswith("configuration: "))
    found = json.loads(zinfer_plan(folder, *options, "--json").stdout)
    (served,) = (line for line in printed.stdout.splitlines() if line.startswith("served: "))
    assert served.startswith("served: requests of 50 tokens in and 8 out, 1 at once: ")
    assert [each["num_requests"] for each in found["served"]] == [1, 16, 256]
    merged = json.loads(line.removeprefix("configuration: "))
    assert merged == found["configuration"] == {**given, "zinfer": {**given["zinfer"], **found["zinfer"]}}
    config.write_text(json.dumps(merged))
    again = json.loads(zinfer_plan(folder, *options, "--json").stdout)
    assert (again["seconds"], again["configuration"]) == (found["seconds"], merged)


def test_a_tier_that_was_given_up_is_not_left_in_the_configuration(planned: JobPlan) -> None:
    merged = planned.configuration({"zinfer": {"kv_cache_tier": "host", "batch_size": 3}, "dtype": "bf16"})
    assert merged == {"dtype": "bf16", "zinfer": {"batch_size": 3, **planned.keys()}}
    assert "kv_cache_tier" not in merged["zinfer"]


def test_as_many_texts_are_said_to_run_at_once_as_the_cache_holds(tmp_path: Path) -> None:
    folder = write_config(tmp_path, SMALL_LLAMA)
    config = tmp_path / "ds.json"
    sizes = {"max_sequences": 128, "kv_cache_memory": 100_000_000, "tokens_per_pass": 8192}
    config.write_text(json.dumps({"zinfer": sizes}))
    options = (
        "--machine",
        "a6000",
        "--rows",
        "900",
        "--prompt-len",
        "120",
        "--new-tokens",
        "8",
        "--config",
        str(config),
    )
    token_bytes = 14 * 2 * 2 * 64 * 2
    fitting = 100_000_000 // (64 * token_bytes) // 2
    assert fitting < 128
    result = zinfer_plan(folder, *options)
    together = json.loads(zinfer_plan(folder, *options, "--json").stdout)["most_sequences_together"]
    assert 0.9 * fitting < together <= fitting
    assert f"{together} at most (max_sequences: 128)" in result.stdout, result.output


def test_the_command_looks_at_the_rows_of_an_input(tmp_path: Path) -> None:
    folder = letters_model(tmp_path / "model")
    rows: list[dict[str, Any]] = [{"prompt": "a" * (1 + number % 9), "max_new_tokens": 3} for number in range(2500)]
    path = write_rows(tmp_path / "in.jsonl", [*rows, {"prompt": 3}, {"prompt": "abc", "n": 2, "temperature": 1.0}])
    result = zinfer_plan(folder, "--machine", "t4", "--input", str(path), "--new-tokens", "7", "--json")
    assert result.exit_code == 0, result.output
    assert 2495 <= json.loads(result.stdout)["rows"] <= 2505
    long = write_rows(tmp_path / "long.jsonl", [{"prompt": "a" * 100}] * 3)
    result = zinfer_plan(folder, "--machine", "t4", "--input", str(long))
    assert "28 new ones each" in result.stdout, "what the model's 128 positions leave, as in a job"
    refused = zinfer_plan(folder, "--machine", "t4", "--input", str(path), "--rows", "3")
    assert refused.exit_code == 2
    assert "--rows and --input both set the number of rows" in refused.stderr
    empty = write_rows(tmp_path / "bad.jsonl", ["{"] * 4)
    refused = zinfer_plan(folder, "--machine", "t4", "--input", str(empty))
    assert refused.exit_code == 2
    assert "none of 4 sampled rows can be used" in refused.stderr


def test_rows_that_would_get_an_error_are_left_out_of_the_plan(tmp_path: Path) -> None:
    folder = letters_model(tmp_path / "model")
    rows: list[dict[str, Any]] = [{"prompt": "abc"}] * 3
    path = write_rows(tmp_path / "in.jsonl", [*rows, {"prompt": "a" * 1000}, {"prompt": "b", "max_new_tokens": 1000}])
    result = zinfer_plan(folder, "--machine", "t4", "--input", str(path), "--new-tokens", "7")
    assert result.exit_code == 0, result.output
    assert "2 of 5 sampled rows would fail, and are left out" in result.stdout


@pytest.mark.parametrize("count", [1, 40, 100, 250])
def test_a_sample_is_from_all_over_the_rows_and_in_their_order(count: int) -> None:
    """Its first rows may be the short ones of a sorted file."""
    lengths = list(range(1, 101))
    rows = Job(5000, lengths, [1] * 100).sample(0, fewest=count).rows
    assert list(rows.prompt_lens) == sorted(rows.prompt_lens)
    assert len(rows.prompt_lens) == count
    assert abs(sum(rows.prompt_lens) / count - 50.5) <= 50 / count + 1


@pytest.mark.slow
def test_how_a_file_is_sorted_changes_its_plan_little(folder: Path) -> None:
    rng, lengths = random.Random(1), [20] * 900 + list(range(20, 520, 5))
    shuffled = rng.sample(lengths, len(lengths))
    machine = machine_with(1_050_000_000, 10**10)
    case = Case(outline_of(folder), machine, SETTINGS)
    seconds = [plan_job(case, Job(1000, each, [16] * 1000)).seconds for each in (lengths, lengths[::-1], shuffled)]
    assert max(seconds) < 1.5 * min(seconds)
