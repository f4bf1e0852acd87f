"""The ranks of a replica: one that hangs ends the others, and all of them are started again."""

import json
import socket
import time
from pathlib import Path

import pytest
from jobs_support import letters_model
from ranks_job_support import run_in_ranks
from serve_support import serving
from test_ranks_hang import HANGING

REQUEST = {"prompt": "ab", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_disk_hangs_is_started_again_with_the_others(tmp_path: Path, rank: int) -> None:
    """Reads hang from when the file that is named as the output of a job has a byte."""
    model, hangs = letters_model(tmp_path / "model", num_layers=4), tmp_path / "hangs"
    settings = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}},
        "zinfer": {"parallel": {"zero": 2}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    variables = {
        **run_in_ranks(tmp_path, HANGING),
        "TEST_RANK": str(rank),
        "TEST_OUTPUT": str(hangs),
    }
    options = ("--config", "ds.json", "--ranks", "2")
    with serving(model, tmp_path, *options, variables=variables) as server, server.http() as http:
        whole = http.post("/v1/completions", json=REQUEST).json()["choices"][0]["text"]
        hangs.write_text("now")
        failed = http.post("/v1/completions", json=REQUEST)
        assert f"rank {rank} on {socket.gethostname()} has stood still in a pass for " in failed.text
        hangs.unlink()
        answer = failed
        while answer.status_code >= 500:  # it ends, and is started again
            time.sleep(0.2)
            answer = http.post("/v1/completions", json=REQUEST)
        assert answer.json()["choices"][0]["text"] == whole
