"""Ray: a dataset completed by a pool of actors, and ranks of one model in a placement group."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from guide_blocks import GUIDE, blocks_of
from guide_runner import PageRunner
from jobs_support import letters_model, prompt_rows, read_rows, write_rows

import zinfer
from zinfer.errors import ConfigError, RankError
from zinfer.jobs import run_job

ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[ray]'")

from zinfer.ranks.ray_actors import rank_variables  # noqa: E402
from zinfer.ray import LLMPredictor, RankActors  # noqa: E402

CONFIG = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "zinfer": {"device": "cpu"}}
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    letters_model(folder / "model", num_layers=4)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two CPUs of this machine."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


@pytest.fixture
def predictor(folder: Path) -> Iterator[LLMPredictor]:
    predictor = LLMPredictor(folder / "model", CONFIG, max_new_tokens=4, keep=["label"])
    yield predictor
    predictor.close()


def test_rows_keep_their_order_columns_and_errors(predictor: LLMPredictor, folder: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "abc", "label": 1},
        {"id": "long", "prompt": "a" * 500, "label": 2},
        {"id": "two", "prompt": "hello", "n": 2, "temperature": 1.0, "label": 3},
        {"id": "hot", "prompt": "abc", "temperature": -1.0, "label": 4},
        {"id": "both", "prompt": "abc", "prompt_token_ids": [5], "label": 5},
        {"id": "tokens", "prompt_token_ids": [5, 6, 7], "logprobs": 1, "label": 6},
        {"id": "none", "label": None},
    ]
    found = predictor(pa.Table.from_pylist(rows, _schema(rows)))
    again = found.to_pylist()
    assert [(row["id"], row["label"]) for row in again] == [(row["id"], row.get("label")) for row in rows]
    errors = {row["id"]: row["error"] for row in again}
    assert [name for name, error in errors.items() if error is None] == ["a", "two", "tokens"]
    assert errors["hot"].startswith("temperature must be"), errors
    assert errors["both"] == "give one of 'prompt', 'messages', 'prompt_token_ids', and only one"
    assert "leaves no room for new ones" in errors["long"]
    wanted = [row for row in rows if errors[row["id"]] is None]
    write_rows(
        folder / "in.jsonl", [{k: v for k, v in row.items() if k != "label" and v is not None} for row in wanted]
    )
    run_job(folder / "model", folder / "in.jsonl", folder / "out.jsonl", config=CONFIG, max_new_tokens=4)
    by_id = {row["id"]: row for row in read_rows(folder / "out.jsonl")}
    for row in again:
        if row["error"] is None:
            job = by_id[row["id"]]
            names = ("text", "token_ids", "finish_reason", "num_prompt_tokens", "num_output_tokens")
            assert [row[name] for name in names] == [job.get(name) for name in names]
            several = [(each["text"], each["token_ids"]) for each in row["outputs"] or ()]
            assert several == [(each["text"], each["token_ids"]) for each in job.get("outputs", ())]
    assert len(by_id["two"]["outputs"]) == 2
    assert [each["top"][0][0] for each in again[5]["logprobs"]] == [
        each["top"][0][0] for each in by_id["tokens"]["logprobs"]
    ]


def _schema(rows: list[dict[str, Any]]) -> Any:
    """A schema with the columns of all rows."""
    return pa.unify_schemas([pa.Table.from_pylist([row]).schema for row in rows if row["label"] is not None])


def test_misspelt_columns_and_chats_are_told_apart(predictor: LLMPredictor) -> None:
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "a", "name": "b"}]
    rows = [{"prompt": "abc", "temperatur": 1.0, "label": 0}, {"messages": chat, "label": 1}]
    found = predictor(pa.Table.from_pylist(rows, _schema(rows)))
    assert "id" not in found.column_names
    said = [row["error"] for row in found.to_pylist()]
    assert said[0] == "unknown field 'temperatur'; did you mean 'temperature'?"
    assert "template" in said[1], "letters have no chat template"
    with pytest.raises(ConfigError, match="keep names label; the dataset has prompt"):
        predictor(pa.Table.from_pylist([{"prompt": "abc"}]))
    with pytest.raises(ConfigError, match='batches are dict; give map_batches batch_format="pyarrow"'):
        predictor({"prompt": ["abc"]})  # type: ignore[arg-type]


def test_columns_of_the_output_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match="keep names id, text, which the output has anyway"):
        LLMPredictor("nowhere", keep=["text", "id"])


def test_a_pool_of_two_actors_completes_a_dataset(folder: Path, cluster: None) -> None:
    rows = [{**row, "label": number} for number, row in enumerate(prompt_rows(40))]
    rows[7]["prompt"] = "a" * 500
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    dataset = ray.data.from_items(rows, override_num_blocks=8).map_batches(
        LLMPredictor,
        fn_constructor_args=(str(folder / "model"), CONFIG),
        fn_constructor_kwargs={"keep": ["label"]},
        batch_format="pyarrow",
        batch_size=5,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    found = dataset.take_all()
    assert [(row["id"], row["label"]) for row in found] == [(row["id"], row["label"]) for row in rows]
    assert [number for number, row in enumerate(found) if row["error"] is not None] == [7]
    write_rows(folder / "pool.jsonl", [{name: row[name] for name in row if name != "label"} for row in rows])
    run_job(folder / "model", folder / "pool.jsonl", folder / "pool-out.jsonl", config=CONFIG)
    by_id = {row["id"]: row.get("text") for row in read_rows(folder / "pool-out.jsonl")}
    assert {row["id"]: row["text"] for row in found} == by_id


def completed(rank: int, model: str) -> tuple[list[list[int]], int, dict[str, str | None]]:
    """Completions of other prompts on each rank, the bytes that came from the other, and the variables."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    with zinfer.LLM(model, CONFIG) as llm:
        found = llm.generate(["abc", "hello"][rank : rank + 1] * (1 + 3 * rank), max_new_tokens=6)
        gathered_bytes = llm.stats().gathered_bytes
    return [list(each.token_ids) for each in found], gathered_bytes, {name: os.environ.get(name) for name in names}


def killed(rank: int, model: str) -> None:
    """Rank 1 is killed while rank 0 makes passes."""
    with zinfer.LLM(model, CONFIG) as llm:
        llm.generate("abc", max_new_tokens=2)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            llm.generate("abc", max_new_tokens=2)


def refused(rank: int) -> str:
    """Make ranks within a placement group."""
    try:
        RankActors(1)
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_ranks_in_a_placement_group_share_a_model(folder: Path, cluster: None) -> None:
    with RankActors(2, num_cpus=1) as ranks:
        found = ranks.run(completed, str(folder / "model"))
    with zinfer.LLM(folder / "model", CONFIG) as llm:
        alone = [list(each.token_ids) for each in llm.generate(["abc", *["hello"] * 4], max_new_tokens=6)]
    assert found[0][0] + found[1][0] == alone
    for rank, (_, gathered_bytes, variables) in enumerate(found):
        assert gathered_bytes > 0, "the ranks did not share the model"
        assert variables.pop("MASTER_ADDR") == ray.util.get_node_ip_address()
        wanted = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        assert variables == {name: str(number) for name, number in wanted.items()}
    with RankActors(2) as ranks, pytest.raises(RankError, match="rank 1 of Ray's was killed or lost"):
        ranks.run(killed, str(folder / "model"))


def test_ranks_that_cannot_be_placed_are_refused(cluster: None) -> None:
    with pytest.raises(RankError, match="no node of Ray has had 3 CPUs and 0 GPUs free for 1 s; ask for fewer ranks"):
        RankActors(3, timeout_s=1)
    with RankActors(1) as ranks:
        assert "ranks within a placement group would wait" in ranks.run(refused)[0]
    with pytest.raises(RankError, match="these ranks have ended; make new ones"):
        ranks.run(refused)
    with pytest.raises(ConfigError, match="size is 0 and num_gpus 0"):
        RankActors(0)


def test_the_guides_code_runs(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runner = PageRunner()
    blocks = [replace(block, comment="") for block in blocks_of(GUIDE / "batch-jobs.md") if block.comment == "ray"]
    assert len(blocks) == 2
    for block in blocks:
        runner.run(block)


def test_all_ranks_see_all_gpus_as_torchruns_do() -> None:
    found = rank_variables(1, 2, "10.0.0.1", 4000, ["3", "1"])
    assert found["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert found["LOCAL_RANK"] == "1", "its own is the second"
    assert "CUDA_VISIBLE_DEVICES" not in rank_variables(1, 2, "10.0.0.1", 4000, [])
