"""Forwards replayed while weights stream: numbers and bytes are as without, whatever slots the blocks come to."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, tiny_checkpoint
from engines import config_for, moved
from graph_support import StandIn, stand_in
from torch import nn
from transformers import AlbertConfig, AlbertModel, PreTrainedModel, T5Config, T5ForConditionalGeneration

import zinfer
from zinfer.graphs import forward_graphs
from zinfer.graphs.capturer import CudaCapturer
from zinfer.graphs.forward_graphs import FIRST
from zinfer.offload.block import Tier
from zinfer.offload.streamer import Streamer

__all__ = ["stand_in"]  # a fixture

pytestmark = pytest.mark.usefixtures("stand_in")

NUM_LAYERS = 5
NEW = 9
CALLS = 3
HOST = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
INT4 = {"zinfer": {"quantization": {"bits": 4, "group_size": 32}}}
INT8 = {"zinfer": {"quantization": {"bits": 8}}}
INJECTED = {"replace_with_kernel_inject": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(2, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))


@contextmanager
def opened(model: Any, config: Any, device: str, **extra: Any) -> Iterator[zinfer.InferenceEngine]:
    engine = zinfer.init_inference(model, config, device=device, enable_cuda_graph=True, **extra)
    try:
        yield engine
    finally:
        engine.destroy()


def streamed(folder: Path, homes: str, num_slots: int, device: str, extra: dict[str, Any]) -> dict[str, Any]:
    config = config_for(folder, homes, num_slots, device)
    own = {**config["zinfer"], **extra.get("zinfer", {})}  # type: ignore[dict-item]
    return {**config, **extra, "zinfer": {name: value for name, value in own.items() if name != "device"}}


def logits_of(engine: zinfer.InferenceEngine, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of each pass of a text."""
    found: list[torch.Tensor] = []
    handle = engine.module.register_forward_hook(lambda module, args, output: found.append(output.logits.clone()))
    engine.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, pad_token_id=1)
    handle.remove()
    return found


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


CASES: list[Any] = [
    *(("host", num_slots, {}) for num_slots in (2, 3)),
    *(("disk", num_slots, {}) for num_slots in (2, 3)),
    ("mixed", 3, {}),
    ("host", 3, INT4),
    ("host", 3, {**INT8, **INJECTED}),
    ("disk", 3, INJECTED),
    ("host", 3, {"zinfer": {"synchronous": True}}),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("homes", "num_slots", "extra"), CASES)
def test_logits_are_those_of_resident_weights(
    folder: Path, ids: torch.Tensor, device: str, stand_in: StandIn, homes: str, num_slots: int, extra: dict[str, Any]
) -> None:
    with opened(folder, extra, device) as engine:
        wanted = [logits_of(engine, ids) for _ in range(CALLS)]
        counts = engine.graphs
        assert counts.pieces == counts.captured == 2, "prompts and tokens"
    assert not torch.equal(wanted[0][1], wanted[0][2])
    stand_in.order.clear()
    with opened(folder, streamed(folder, homes, num_slots, device, extra), device) as engine:
        assert engine.plan.num_slots == num_slots
        for each in wanted:
            assert_equal(logits_of(engine, ids), each)
        found = engine.graphs
        assert (found.captured, found.replayed, found.eager) == (2, counts.replayed, counts.eager)
        num_streamed = len(engine.plan.homes) - engine.plan.num_blocks(Tier.DEVICE)
        assert num_streamed >= NUM_LAYERS - 1
        assert found.pieces == 2 * (num_streamed + 1 + num_slots * num_streamed)
        if homes != "mixed" and device == "cpu":
            # Each block comes to all slots in turn, or to the same ones where there are as many blocks for each. Of
            # prompts one was replayed.
            num_visited = num_slots // gcd(num_slots, num_streamed)
            assert len(set(stand_in.order)) == 2 * (num_streamed + 1) + (1 + num_visited) * num_streamed


@pytest.mark.gpu
@pytest.mark.parametrize(("homes", "num_slots"), [("host", 2), ("host", 3), ("disk", 3)])
def test_kernels_that_begin_early(folder: Path, ids: torch.Tensor, homes: str, num_slots: int) -> None:
    """In 16 bits products are of kernels that load weights while those ahead still run: never before these have come,
    nor while the next block's do."""
    extra = {"dtype": "fp16", **INJECTED}
    with opened(folder, extra, "cuda") as engine:
        wanted = [logits_of(engine, ids[:1]) for _ in range(CALLS)]
    with opened(folder, streamed(folder, homes, num_slots, "cuda", extra), "cuda") as engine:
        for each in wanted * 3:
            assert_equal(logits_of(engine, ids[:1]), each)
        assert engine.graphs.replayed > 3 * NEW


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("homes", "num_slots"), [("host", 3), ("disk", 2), ("mixed", 3)])
def test_bytes_moved_are_those_of_pythons_launches(
    folder: Path, ids: torch.Tensor, device: str, homes: str, num_slots: int
) -> None:
    config = streamed(folder, homes, num_slots, device, {})
    seen = []
    for flag in (False, True):
        with ExitStack() as stack:
            engine = zinfer.init_inference(folder, config, device=device, enable_cuda_graph=flag)
            stack.callback(engine.destroy)
            for _ in range(CALLS):
                engine.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, pad_token_id=1)
            assert (engine.graphs.replayed > NEW) == flag
            assert engine.stats().passes == CALLS * NEW
            seen.append(moved(engine))
    assert seen[0] == seen[1]
    assert seen[0][homes == "disk"] > CALLS * NEW * 100_000


def test_layers_alone_stream(folder: Path, ids: torch.Tensor, device: str) -> None:
    """What lies between two streamed layers is recorded too, be it nothing."""
    with opened(folder, HOST, device) as engine:
        for _ in range(CALLS):
            logits_of(engine, ids)
        assert engine.graphs.pieces == engine.graphs.captured * (NUM_LAYERS + 1 + 2 * NUM_LAYERS)
        assert engine.graphs.replayed > NEW


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_class", ["albert", "t5"])
def test_other_families(model_class: str, device: str) -> None:
    """A module that runs several times a pass; layers that give tuples, and look at what an encoder made."""
    torch.manual_seed(0)
    model: PreTrainedModel
    if model_class == "albert":
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        model = AlbertModel(AlbertConfig(vocab_size=VOCAB_SIZE, embedding_size=16, **shape))  # type: ignore[arg-type]
    else:
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 3, "num_heads": 2, "vocab_size": VOCAB_SIZE}
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None))
    for parameter in model.eval().parameters():
        nn.init.normal_(parameter, std=0.3)
    given = torch.randint(2, VOCAB_SIZE, (2, 7), generator=torch.Generator().manual_seed(3))

    def compute(found: Any) -> torch.Tensor:
        if model_class == "albert":
            return found(input_ids=given.to(device)).last_hidden_state.cpu()  # type: ignore[no-any-return]
        return found.generate(input_ids=given, max_new_tokens=NEW, do_sample=False).cpu()  # type: ignore[no-any-return]

    wanted = compute(model) if device == "cpu" else None
    with opened(model, HOST, device) as engine:
        assert engine.stats().streamed_bytes_per_pass > 0
        found = [compute(engine) for _ in range(4)]
        assert engine.graphs.captured > 0, engine.graphs
        assert engine.graphs.replayed > 1
        assert all(torch.allclose(each, found[0], rtol=1e-4, atol=1e-4) for each in found)
        assert wanted is None or torch.allclose(found[0], wanted, rtol=1e-4, atol=1e-4)


class Keeping(nn.Module):
    """Keeps what it computes inside, as nothing may that is recorded in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.linear(x)
        return self.kept * 2


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_keeps_its_inside_is_launched_by_python(device: str) -> None:
    model, x = Stack().eval(), torch.randn(2, 8)
    with torch.no_grad():
        wanted = model(x)
    with opened(model, {**HOST, "injection_policy": {Keeping: ("linear",)}}, device) as engine:
        for _ in range(3):
            assert torch.allclose(engine(x.to(device)).cpu(), wanted, atol=1e-5)
        assert engine.graphs.captured == engine.graphs.replayed == 0
        reason = "cannot be captured: an intermediate result of the streamed block layers.0 is kept"
        assert engine.graphs.eager == {FIRST: 1, reason: 2}


def test_what_cannot_be_recorded_is_launched_by_python(
    folder: Path, ids: torch.Tensor, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it fails in the middle of a block that stands nowhere yet, the block streams as before."""
    with opened(folder, HOST, device) as engine:
        wanted = engine.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
        num_ended = 0
        plain = {recorder: recorder.end for recorder in (StandIn, CudaCapturer)}

        def end(self: Any) -> Callable[[], None]:
            nonlocal num_ended
            num_ended += 1
            found = plain[type(self)](self)
            if num_ended % 4 == 0:
                raise RuntimeError("out of room")
            return found

        for recorder in plain:
            monkeypatch.setattr(recorder, "end", end)
        for _ in range(3):
            found = engine.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
            assert torch.equal(found[:, : wanted.shape[1]], wanted)
        assert engine.graphs.captured == 0
        assert engine.graphs.eager["cannot be captured: out of room"] > NEW, engine.graphs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_replay_that_is_cut_short(
    folder: Path, ids: torch.Tensor, device: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with opened(folder, HOST, device) as engine:
        wanted = [logits_of(engine, ids) for _ in range(CALLS)][-1]
        replayed, plain, num_waits = engine.graphs.replayed, Streamer.slot_of, 0

        def slot_of(self: Streamer, block: Any) -> Any:
            nonlocal num_waits
            num_waits += 1
            if num_waits == NUM_LAYERS + 3:
                raise error("in the middle of the second pass")
            return plain(self, block)

        monkeypatch.setattr(Streamer, "slot_of", slot_of)
        with pytest.raises(error):
            logits_of(engine, ids)
        assert engine._runtime is not None
        assert engine._runtime._streamer is not None
        assert engine._runtime._streamer.held() == []
        assert engine.graphs.replayed == replayed + 2
        assert_equal(logits_of(engine, ids), wanted)


def test_pieces_are_bounded(folder: Path, ids: torch.Tensor, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room beside those that are replayed, a form is left to Python: nothing is recorded in turn."""
    monkeypatch.setattr(forward_graphs, "_MOST_PIECES", 40)
    with opened(folder, HOST, device) as engine:
        for rows in (1, 2, 1, 2):
            for _ in range(3):
                engine(input_ids=ids[:rows].to(device), use_cache=False)
        assert engine._acceleration._graphs is not None
        assert len(engine._acceleration._graphs._graphs) == 2
        monkeypatch.setattr(forward_graphs, "_MOST_PIECES", 20)
        for _ in range(3):
            engine(input_ids=ids[:, :5].to(device), use_cache=False)
        assert engine.graphs.eager["too many graphs of other forms"] == 2
        replayed = engine.graphs.replayed
        for rows in (1, 2, 1, 2):
            engine(input_ids=ids[:rows].to(device), use_cache=False)
        assert (engine.graphs.captured, engine.graphs.replayed) == (2, replayed + 4)
