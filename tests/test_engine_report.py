"""What a replica reports of its passes, against the model's own counters."""

from pathlib import Path

import pytest
from jobs_support import letters_model

from zinfer import LLM
from zinfer.batching.pass_meter import TOKENS, Histogram, PassMeter
from zinfer.serve.engine_report import EngineReport

STREAMED = {"zero_optimization": {"offload_param": {"device": "nvme"}}}


def test_a_value_counts_at_the_least_bound_that_is_not_below_it() -> None:
    histogram = Histogram((1, 8, 16))
    for value in (0, 1, 2, 8, 9, 16, 17, 1000):
        histogram.add(value)
    assert histogram.counts == [2, 2, 2, 2]
    assert histogram.total == 1053


def test_free_tokens_are_unused_where_passes_are_small() -> None:
    meter = PassMeter()
    meter.free_tokens = 100
    meter.begin()
    for num_tokens in (1, 99, 100, 500):
        meter.end(num_tokens)
    assert meter.num_unused == 99 + 1
    assert (sum(meter.seconds.counts), meter.tokens.total) == (4, 700)


def test_a_report_has_the_counters_of_a_model_that_streams(tmp_path: Path) -> None:
    model = letters_model(tmp_path / "letters")
    with LLM(str(model), STREAMED, device="cpu") as llm:
        llm.measure_passes().free_tokens = 5  # stated, since measured rates may leave none on a busy machine
        report = EngineReport(llm)
        idle = report.make()
        assert (idle.num_passes, idle.shares, idle.num_unused_tokens) == (0, {"link": 0.0, "disk": 0.0}, 0)
        assert idle.free_tokens == 5
        completions = llm.generate(["abc", "de"], max_new_tokens=7, ignore_eos=True)
        load = report.make()
        # A pass may be launched that nobody takes tokens of.
        assert llm.num_passes - 1 <= load.num_passes <= llm.num_passes
        assert load.num_passes >= 7
        by_tokens = dict(zip(TOKENS, load.pass_tokens.counts, strict=False))
        assert (by_tokens[8], by_tokens[1] + by_tokens[8]) == (load.num_passes, load.num_passes)
        assert load.pass_seconds.total > 0
        assert load.num_new_tokens == sum(len(each.token_ids) for each in completions) == 14
        assert load.num_unused_tokens == load.free_tokens * load.num_passes - int(load.pass_tokens.total)
        stats = llm.stats()
        assert load.moved_bytes == {"link": stats.bytes_to_device, "disk": stats.bytes_read_disk}
        assert stats.disk_bytes_per_pass == load.streamed_bytes > 0
        assert load.shares["disk"] > 0
        assert load.blocks["DISK"] > 0
        assert 0 < load.num_pages == llm.batching.num_pages
        assert report.make().shares["disk"] < load.shares["disk"]  # nothing is read any more
    with pytest.raises(RuntimeError, match="closed"):
        report.make()
