"""`deploy/ray_serve.py`: two replicas of a model behind Ray Serve."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from jobs_support import letters_model

from zinfer import LLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'ray[serve]'")
ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [f"ab{chr(97 + number)}" for number in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    sys.path.insert(0, str(ROOT))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        from deploy.ray_serve import Arguments, build

        serve.start(http_options={"port": port, "host": "127.0.0.1"})
        os.environ["ZINFER_API_KEY"] = "a b"
        serve.run(build(Arguments(model=model, replicas=2, device="cpu")))
        yield f"http://127.0.0.1:{port}"
    finally:
        os.environ.pop("ZINFER_API_KEY", None)
        sys.path.remove(str(ROOT))
        serve.shutdown()
        ray.shutdown()


def test_two_replicas_answer_as_one_model(url: str, model: Path) -> None:
    with LLM(str(model), device="cpu") as llm:
        wanted = [llm.generate(each, max_new_tokens=12)[0].text for each in PROMPTS]
    (deployment,) = serve.status().applications["default"].deployments.values()
    assert deployment.replica_states == {"RUNNING": 2}
    fields = {"max_tokens": 12, "temperature": 0}
    with httpx.Client(base_url=url, timeout=120, headers={"authorization": "Bearer b"}) as http:
        found = [http.post("/v1/completions", json={"prompt": each, **fields}).json() for each in PROMPTS]
        assert [each["choices"][0]["text"] for each in found] == wanted
        assert http.post("/v1/completions", json={"prompt": 1}).status_code == 400
        stream = http.post("/v1/completions", json={"prompt": PROMPTS[0], "stream": True, **fields}).text
        assert stream.endswith("data: [DONE]\n\n")


def test_nothing_is_answered_without_a_key(url: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as http:
        for path in ("/v1/models", "/openapi.json", "/load"):
            assert http.get(path).status_code == 401
        assert "/v1/completions" in http.get("/openapi.json", headers={"authorization": "Bearer a"}).json()["paths"]
