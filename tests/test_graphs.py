"""Forwards replayed as graphs: equal tokens, each form recorded once, Python's own launches where none can serve."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint
from graph_support import StandIn, assert_in_order, stand_in
from ragged_models import VOCAB_SIZE, tiny_model
from transformers import DynamicCache, StaticCache, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import StaticLayer

import zinfer
from zinfer.engine import acceleration
from zinfer.engine.static_caches import StaticCaches
from zinfer.errors import NonFiniteError
from zinfer.graphs import static_layer
from zinfer.graphs.capturer import CudaCapturer
from zinfer.graphs.forward_graphs import FIRST, ForwardGraphs

__all__ = ["stand_in"]  # a fixture

NEW = 12
"""Tokens: one of the prompt's pass, and the others by a pass each."""
COPYING = ("bloom", "falcon")
"""Whose code makes small tensors on the CPU in each forward; no graph can replay such copies."""
WAITING = "opt"
"""Whose code asks the device how many tokens there are where it is given no mask, as in the pass of a prompt without
padding: it makes a mask of ones that is as long. Its other passes are given one."""
REFUSED = "cannot be captured"
ALLOWED = 100
"""Steps of float32 at the largest logit: a capture writes masks out, so that another kernel sums up attention, and what
it rounds differently passes through all layers. On an H200 that were 25 steps."""


@pytest.fixture
def engine(stand_in: object, device: str, tmp_path: Path) -> zinfer.InferenceEngine:
    return zinfer.init_inference(tiny_checkpoint("llama", tmp_path), device=device, enable_cuda_graph=True)


def ids_of(seed: int, rows: int = 1, tokens: int = 9) -> torch.Tensor:
    return torch.randint(2, VOCAB_SIZE, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def greedy(generate: Callable[..., Any], ids: torch.Tensor, new: int = NEW, **options: Any) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 1, **options}
    return generate(input_ids=ids, **options).tolist()  # type: ignore[no-any-return]


def rounding_between(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, in steps of float32 at the largest number."""
    step = torch.finfo(torch.float32).eps * wanted.abs().max()
    return float((found - wanted).abs().max() / step)


def assert_rounded_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype == torch.float32
    assert rounding_between(found, wanted) <= ALLOWED


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "gpt_neox", "mistral", "gemma2", "qwen3", "falcon", "phi"])
def test_tokens_are_those_of_transformers(family: str, device: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    texts = [ids_of(seed) for seed in range(3)]
    wanted = [greedy(model.generate, text) for text in texts]
    assert len({token for tokens in wanted for token in tokens[0][9:]}) > 4, "texts that say nothing"
    model.save_pretrained(tmp_path)
    engine = zinfer.init_inference(tmp_path, device=device, enable_cuda_graph=True)
    counts = engine.graphs
    seen = []
    for text, tokens in zip(texts, wanted, strict=True):
        assert greedy(engine.generate, text) == tokens
        seen.append((counts.captured, counts.replayed))
    assert engine.stats().passes == 3 * NEW == counts.replayed + counts.eager.total()
    if device == "cuda" and family in COPYING:
        assert any(REFUSED in reason for reason in counts.eager), counts
    else:
        # Keys and values had no place yet; then came the first pass of one token, and the second was recorded. In the
        # third text its prompt's pass has come for the second time with keys and values in place.
        prompts = int(family != WAITING)
        assert seen == [(1, NEW - 2), (1, NEW - 2 + NEW - 1), (1 + prompts, NEW - 2 + 2 * (NEW - 1) + prompts)], counts
        assert sum(count for reason, count in counts.eager.items() if REFUSED in reason) == 1 - prompts
    engine.destroy()


def test_keys_and_values_are_written_by_one_kernel(engine: zinfer.InferenceEngine) -> None:
    for seed in range(3):
        greedy(engine.generate, ids_of(seed))
    ((_, cache),) = engine._acceleration.caches._caches
    assert {type(layer) for layer in cache.layers} == {static_layer.FusedStaticLayer}
    for layer in cache.layers:
        assert (layer.cumulative_length, layer.arrivals) == (9 + NEW - 1, 0)
        assert (layer.keys[:, :, : 9 + NEW - 1] != 0).any(-1).all()
        assert not layer.keys[:, :, 9 + NEW - 1 :].any()
    engine.destroy()


def test_keys_and_values_of_transformers_own(engine: zinfer.InferenceEngine) -> None:
    """Those that a caller made are replayed as well."""
    cache = StaticCache(config=engine.module.config, max_cache_len=16)
    found = []
    for _ in range(3):
        given = engine(input_ids=ids_of(1), past_key_values=cache, attention_mask=torch.ones(1, 9, dtype=torch.long))
        found.append(given.logits)
        cache.reset()
    assert (engine.graphs.captured, engine.graphs.replayed) == (1, 1)
    assert_rounded_alike(found[2], found[0])
    engine.destroy()


def test_padded_prompts(engine: zinfer.InferenceEngine, tmp_path: Path) -> None:
    ids, mask = left_padded(random_prompts(3))
    plain = zinfer.init_inference(tmp_path, device="cpu")
    wanted = greedy(plain.generate, ids, attention_mask=mask)
    for _ in range(3):
        assert greedy(engine.generate, ids, attention_mask=mask) == wanted
    assert engine.graphs.replayed == 3 * NEW - 3
    several = greedy(plain.generate, ids, attention_mask=mask, num_return_sequences=1, max_new_tokens=5)
    assert greedy(engine.generate, ids, attention_mask=mask, max_new_tokens=5) == several
    plain.destroy()
    engine.destroy()


def test_lengths_of_many_kinds(engine: zinfer.InferenceEngine, tmp_path: Path) -> None:
    """More shapes of keys and values than are kept; those that are asked for again are recorded anew."""
    plain = zinfer.init_inference(tmp_path, device="cpu")
    for rows in (1, 2, 3, 4, 5, 6, 1, 2):
        ids = ids_of(rows, rows)
        assert greedy(engine.generate, ids, 5) == greedy(plain.generate, ids, 5)
    assert engine.graphs.captured == 8
    assert len(engine._acceleration.caches._caches) == 4
    plain.destroy()
    engine.destroy()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"use_cache": False}, "use_cache"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    ],
)
def test_ways_to_generate_that_no_graph_serves(
    engine: zinfer.InferenceEngine, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    plain = zinfer.init_inference(tmp_path, device=engine.device.type)
    fresh = {name: DynamicCache() if name == "past_key_values" else value for name, value in options.items()}
    assert greedy(engine.generate, ids_of(1), **options) == greedy(plain.generate, ids_of(1), **fresh)
    assert engine.graphs.captured == 0
    assert any(reason in why for why in engine.graphs.eager), engine.graphs
    plain.destroy()
    engine.destroy()


def test_sampled_tokens_are_those_of_the_seed(engine: zinfer.InferenceEngine) -> None:
    found = []
    for _ in range(3):
        torch.manual_seed(5)
        found.append(greedy(engine.generate, ids_of(1), do_sample=True, temperature=0.8))
    assert found[0] == found[1] == found[2] != greedy(engine.generate, ids_of(1))
    engine.destroy()


def test_what_one_replay_gave_is_not_changed_by_the_next(engine: zinfer.InferenceEngine) -> None:
    plain = [engine(input_ids=ids_of(1)).logits, engine(input_ids=ids_of(2)).logits]
    kept = [engine(input_ids=ids_of(seed)).logits for seed in (1, 2)]
    assert engine.graphs.replayed == 0
    assert engine.graphs.eager["cannot be captured: it returns a DynamicCache"] == 3, "each call is to have its own"
    once = [engine(input_ids=ids_of(seed), use_cache=False).logits for seed in (1, 2, 1, 2)]
    assert (engine.graphs.captured, engine.graphs.replayed) == (1, 3)
    for found, wanted in zip([*kept, *once], plain * 3, strict=True):
        assert_rounded_alike(found, wanted)
    assert rounding_between(*plain) > 1000 * ALLOWED, "what one overwrote would not be seen"
    engine.destroy()


def test_a_layer_that_breaks_in_a_replayed_pass_is_named(engine: zinfer.InferenceEngine) -> None:
    for seed in range(3):
        greedy(engine.generate, ids_of(seed))
    assert engine.graphs.captured == 2, "prompts and tokens"
    engine.module.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"come first from model\.layers\.1"):
        greedy(engine.generate, ids_of(4))
    assert engine.graphs.eager["its layers are being checked"] == 1
    ids, before = ids_of(4, rows=2), engine.graphs.replayed
    found = engine.find_broken(lambda: greedy(engine.generate_unchecked, ids), len(ids))
    assert found == ["model.layers.1"] * len(ids)
    assert engine.graphs.replayed == before
    engine.destroy()


def test_many_tokens_are_launched_by_python(engine: zinfer.InferenceEngine) -> None:
    for _ in range(3):
        engine(input_ids=ids_of(1, rows=65, tokens=64), use_cache=False)
    assert engine.graphs.eager == {"more than 4096 tokens": 3}
    engine.destroy()


def refuse(self: object) -> None:
    raise RuntimeError("operation not permitted when stream is capturing\nmore of it")


@contextmanager
def break_off(self: object) -> Iterator[None]:
    """As torch does: the end of a capture finds it broken off, and raises that in the place of what broke it."""
    try:
        refuse(self)
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def say_nothing(self: object) -> None:
    raise NotImplementedError


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("part", "fails", "reason"),
    [
        ("begin", refuse, "operation not permitted when stream is capturing"),
        ("end", refuse, "operation not permitted when stream is capturing"),
        ("session", break_off, "operation not permitted when stream is capturing"),
        ("begin", say_nothing, "NotImplementedError"),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_what_cannot_be_recorded_is_launched_by_python(
    engine: zinfer.InferenceEngine, monkeypatch: pytest.MonkeyPatch, part: str, fails: Callable[..., Any], reason: str
) -> None:
    wanted = greedy(engine.generate, ids_of(1))
    with monkeypatch.context() as patch:
        for recorder in (StandIn, CudaCapturer):
            patch.setattr(recorder, part, fails)
        engine._acceleration.caches.close()
        try:
            raise ValueError("what the caller was busy with")
        except ValueError:
            assert greedy(engine.generate, ids_of(1)) == wanted
    assert engine.graphs.eager[f"cannot be captured: {reason}"] > NEW // 2, engine.graphs
    if engine.device.type == "cuda":
        assert_in_order()  # a session ends what is open, whoever was to end it
    assert engine.graphs.captured == 1, "before it failed"
    assert greedy(engine.generate, ids_of(1).repeat(2, 1)) == wanted * 2
    assert engine.graphs.captured == 2
    engine.destroy()


@pytest.mark.usefixtures("stand_in")
def test_engines_that_replay_nothing_say_why(device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    engine = zinfer.init_inference(folder, device=device, enable_cuda_graph=True, check_finite=True)
    assert "check_finite" in caplog.text
    greedy(engine.generate, ids_of(1))
    assert engine.graphs.captured == engine.graphs.replayed == 0
    engine.destroy()


def test_a_cpu_has_no_graphs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = zinfer.init_inference(tiny_checkpoint("llama", tmp_path), device="cpu", enable_cuda_graph=True)
    assert "graphs need a CUDA device" in caplog.text
    engine.destroy()


def test_the_model_is_left_as_it_was(engine: zinfer.InferenceEngine) -> None:
    greedy(engine.generate, ids_of(1))
    module = engine.module
    assert "_prepare_static_cache" not in vars(module)
    engine.destroy()
    assert "forward" not in vars(module)
    assert not engine._acceleration.caches._caches


@pytest.mark.usefixtures("stand_in")
def test_an_encoder_decoder(device: str) -> None:
    torch.manual_seed(0)
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB_SIZE}
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, eos_token_id=None)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    wanted = [greedy(model.generate, ids_of(seed)) for seed in range(3)]
    model.to(device)  # type: ignore[arg-type]
    where = torch.device(device)
    recorder = acceleration.capturer_for(where)
    assert recorder is not None
    graphs = ForwardGraphs(recorder, where)
    found = StaticCaches(model, graphs)
    model.forward = graphs.wrap(model.forward)
    with torch.no_grad():
        for seed in range(3):
            assert greedy(found.generate, ids_of(seed).to(device)) == wanted[seed]
    ((_, cache),) = found._caches
    kinds = [
        {type(layer) for layer in part.layers} for part in (cache.self_attention_cache, cache.cross_attention_cache)
    ]
    assert kinds == [{static_layer.FusedStaticLayer}, {StaticLayer}], "an encoder's are written once"
    # The first pass over what the encoder made fills the keys and values of the decoder's look at it.
    assert graphs.counts.eager["the first pass over an encoder's output"] == 3
    assert (graphs.counts.captured, graphs.counts.replayed) == (1, 3 * (NEW - 1) - 1)
    assert graphs.counts.eager[FIRST] == 1
