"""An engine in use: transformers' own semantics, errors that leave it usable, and nothing left behind."""

import dataclasses
import gc
import itertools
import mmap
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MAX_POSITIONS, left_padded, random_prompts, tiny_checkpoint, tiny_model
from engines import HOMES, config_for, distinct_tokens
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, PreTrainedModel

import zinfer
from zinfer.nvme.reader import DiskReadError
from zinfer.offload.stats import RunStats

Tensors = dict[str, torch.Tensor]
STREAMED = ("host", "disk", "mixed")
NUM_LAYERS = 5
PROMPT = torch.tensor([[5, 17, 40, 99, 3]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS, shards=2)


@pytest.fixture(scope="module")
def eager(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model


@pytest.fixture(scope="module")
def batch() -> Tensors:
    input_ids, attention_mask = left_padded(random_prompts(4, seed=12))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@contextmanager
def engine_in(folder: Path, homes: str = "disk", num_slots: int = 2, **extra: Any) -> Iterator[zinfer.InferenceEngine]:
    engine = zinfer.init_inference(folder, config_for(folder, homes, num_slots, "cpu"), **extra)
    try:
        yield engine
    finally:
        engine.destroy()


@pytest.fixture(scope="module", params=STREAMED)
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[zinfer.InferenceEngine]:
    """One engine for many tests: what a test does to it must not show in the next."""
    with engine_in(folder, request.param, 3) as made:
        yield made


@pytest.fixture(scope="module")
def resident(folder: Path) -> Iterator[zinfer.InferenceEngine]:
    with engine_in(folder, "resident") as made:
        yield made


def greedy(model: Any, **kwargs: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(**({"input_ids": PROMPT, "max_new_tokens": 10, "do_sample": False} | kwargs))
    return tokens


def logits_of(model: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**(kwargs or {"input_ids": PROMPT})).logits
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 26, "do_sample": False},
        {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False},
        {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=1)},
        {"generation_config": GenerationConfig(max_length=24, do_sample=False, pad_token_id=1)},
        {"max_new_tokens": 8, "num_beams": 2, "do_sample": False},
        {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "top_p": 0.9},
        {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3},
        {"max_new_tokens": 8, "do_sample": True, "num_beams": 2},
        {"max_new_tokens": 8, "do_sample": False, "repetition_penalty": 1.4},
        {"max_new_tokens": 8, "do_sample": False, "use_cache": False},
        {"max_new_tokens": 30, "do_sample": False, "eos_token_id": 9},
    ],
    ids=lambda options: " ".join(options),
)
def test_generate_options(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, batch: Tensors, options: dict[str, Any]
) -> None:
    torch.manual_seed(5)
    expected = eager.generate(**batch, **options)
    torch.manual_seed(5)
    tokens = engine.generate(**batch, **options)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, expected)
    assert distinct_tokens(tokens) >= 4


def test_generate_with_scores(
    engine: zinfer.InferenceEngine, resident: zinfer.InferenceEngine, eager: PreTrainedModel
) -> None:
    """Bit-equal to the resident engine; to transformers' as far as a sum depends on where in memory its terms lie."""
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 5, "do_sample": False}
    expected, twin, found = (model.generate(PROMPT, **options) for model in (eager, resident, engine))
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, twin.scores, strict=True))
    for a, b in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_inputs_by_position_by_name_and_as_inputs(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    expected = greedy(eager)
    assert torch.equal(engine.generate(PROMPT, max_new_tokens=10, do_sample=False), expected)
    assert torch.equal(engine.generate(inputs=PROMPT, max_new_tokens=10, do_sample=False), expected)
    assert torch.equal(engine.module.generate(PROMPT, max_new_tokens=10, do_sample=False), expected)
    settings = GenerationConfig(max_new_tokens=10, do_sample=False)
    assert torch.equal(engine.generate(PROMPT, settings), expected)


def test_embeddings_in_place_of_ids(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    embeddings = eager.get_input_embeddings()(PROMPT).detach()
    expected = greedy(eager, input_ids=None, inputs_embeds=embeddings)
    assert torch.equal(greedy(engine, input_ids=None, inputs_embeds=embeddings), expected)


def test_either_padding_side_gives_each_prompts_own_logits(engine: zinfer.InferenceEngine) -> None:
    prompts = random_prompts(3, seed=21)
    alone = [logits_of(engine, input_ids=torch.tensor([prompt]))[0, -1] for prompt in prompts]
    input_ids, mask = left_padded(prompts)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    left = logits_of(engine, input_ids=input_ids, attention_mask=mask, position_ids=positions)[:, -1]
    right_ids, right_mask = input_ids.clone(), mask.clone()
    for row, prompt in enumerate(prompts):
        right_ids[row] = torch.tensor(prompt + [1] * (input_ids.shape[1] - len(prompt)))
        right_mask[row] = torch.tensor([1] * len(prompt) + [0] * (input_ids.shape[1] - len(prompt)))
    right = logits_of(engine, input_ids=right_ids, attention_mask=right_mask)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(left[row], alone[row], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(right[row, len(prompt) - 1], alone[row], rtol=1e-4, atol=1e-4)


def test_forward_with_labels_hidden_states_and_tuples(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, batch: Tensors
) -> None:
    with torch.no_grad():
        expected = eager(**batch, labels=batch["input_ids"], output_hidden_states=True)
    found = engine(**batch, labels=batch["input_ids"], output_hidden_states=True)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    assert len(found.hidden_states) == NUM_LAYERS + 1
    assert all(torch.equal(a, b) for a, b in zip(found.hidden_states, expected.hidden_states, strict=True))
    assert torch.equal(engine(batch["input_ids"], batch["attention_mask"], return_dict=False)[0], expected.logits)
    assert not found.logits.requires_grad


def test_forward_goes_on_from_a_cache(
    engine: zinfer.InferenceEngine, resident: zinfer.InferenceEngine, eager: PreTrainedModel
) -> None:
    with torch.no_grad():
        start = eager(PROMPT, use_cache=True)
        expected = eager(torch.tensor([[8]]), past_key_values=start.past_key_values).logits
    found = []
    for model in (resident, engine):
        start = model(PROMPT, use_cache=True)
        found.append(model(torch.tensor([[8]]), past_key_values=start.past_key_values).logits)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1], expected, rtol=1e-5, atol=1e-5)


def test_a_logits_processor_may_ask_the_engine(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    """As classifier-free guidance does: a forward between two passes of `generate`, in the same thread."""

    def guided(model: Any) -> torch.Tensor:
        def guide(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + 2 * logits_of(model, input_ids=input_ids[:, 1:])[:, -1]

        return greedy(model, logits_processor=LogitsProcessorList([guide]))

    expected = guided(eager)
    assert not torch.equal(expected, greedy(eager))
    assert torch.equal(guided(engine), expected)


def test_the_module_says_where_it_computes(engine: zinfer.InferenceEngine) -> None:
    assert engine.device == engine.module.device == torch.device("cpu")
    assert engine.module.dtype == torch.float32
    assert not engine.module.training
    assert isinstance(engine, nn.Module)


def test_parts_of_the_module_may_be_called(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    with torch.no_grad():
        expected = eager.model(PROMPT).last_hidden_state
        assert torch.equal(engine.module.model(PROMPT).last_hidden_state, expected)
        assert torch.equal(engine.module.get_input_embeddings()(PROMPT), eager.get_input_embeddings()(PROMPT))
        assert torch.equal(engine.module.lm_head(expected), eager.lm_head(expected))
    assert torch.equal(greedy(engine), greedy(eager))


def test_a_streamed_parameter_is_meta_between_uses(folder: Path) -> None:
    with engine_in(folder, "disk") as engine:
        for _ in range(2):
            assert all(parameter.is_meta for parameter in engine.module.parameters())
            assert all(tensor.is_meta for tensor in engine.module.state_dict().values())
            greedy(engine)
        shapes = {name: parameter.shape for name, parameter in engine.module.named_parameters()}
        assert shapes["model.layers.0.mlp.up_proj.weight"] == (128, 64)


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, weight: weight.sum().item(),
        lambda layer, weight: weight.tolist(),
        lambda layer, weight: torch.ones(64, 64) * weight,
        lambda layer, weight: torch.ones(1, 64) @ weight.T,
        lambda layer, weight: nn.functional.linear(torch.ones(1, 64), weight),
        lambda layer, weight: torch.addmm(torch.zeros(64), torch.ones(1, 64), weight),
        lambda layer, weight: layer.self_attn.q_proj(torch.ones(1, 64)),
        lambda layer, weight: layer.mlp(torch.ones(1, 2, 64)),
    ],
    ids=["item", "tolist", "times", "matmul", "linear", "addmm", "projection", "mlp"],
)
def test_using_a_streamed_parameter_outside_its_block_is_an_error(
    engine: zinfer.InferenceEngine, use: Callable[[nn.Module, torch.Tensor], object]
) -> None:
    """torch's matrix products do not refuse a meta operand on the CPU: they return whatever lies in memory."""
    layer = engine.module.model.layers[NUM_LAYERS - 1]
    weight = layer.self_attn.q_proj.weight
    assert weight.is_meta
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        print(use(layer, weight))


@pytest.fixture
def long_prompt() -> torch.Tensor:
    return torch.randint(2, 131, (2, MAX_POSITIONS - 8), generator=torch.Generator().manual_seed(1))


def moved(engine: zinfer.InferenceEngine) -> tuple[int, int, int]:
    stats = settled(engine)
    return stats.bytes_read_disk, stats.bytes_to_device, stats.passes


def settled(engine: zinfer.InferenceEngine) -> RunStats:
    """The counters once the moves ahead for the next pass are done."""
    stats = engine.stats()
    while True:
        time.sleep(0.03)
        later = engine.stats()
        if later.bytes_to_device == stats.bytes_to_device and later.bytes_read_disk == stats.bytes_read_disk:
            return later
        stats = later


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 9},
        {"max_length": MAX_POSITIONS + 1},
        {"generation_config": GenerationConfig(max_new_tokens=9)},
        {"generation_config": GenerationConfig(max_length=MAX_POSITIONS + 1)},
        {"min_new_tokens": 9, "max_new_tokens": 9},
        {"max_new_tokens": 9, "num_beams": 2},
        {"generation_config": GenerationConfig(max_new_tokens=2), "max_new_tokens": 9},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("with_mask", [True, False])
def test_more_tokens_than_positions_are_refused_before_any_compute(
    engine: zinfer.InferenceEngine, long_prompt: torch.Tensor, options: dict[str, Any], with_mask: bool
) -> None:
    before = moved(engine)
    mask = {"attention_mask": torch.ones_like(long_prompt)} if with_mask else {}
    with pytest.raises(ValueError, match=r"120 input tokens and 9 new ones exceed the model's positions \(128\)"):
        engine.generate(input_ids=long_prompt, do_sample=False, **mask, **options)
    with pytest.raises(ValueError, match="120 input tokens and 9 new ones"):
        engine.generate(long_prompt, do_sample=False, **mask, **options)
    assert moved(engine) == before


def test_a_generation_config_by_position_counts(engine: zinfer.InferenceEngine, long_prompt: torch.Tensor) -> None:
    before = moved(engine)
    with pytest.raises(ValueError, match="120 input tokens and 9 new ones"):
        engine.generate(long_prompt, GenerationConfig(max_new_tokens=9, do_sample=False))
    assert moved(engine) == before


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_without_a_length_transformers_own_default_counts(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, long_prompt: torch.Tensor
) -> None:
    """Its 20 new tokens would not fit; it stops at the last position itself, or the call is refused."""
    mask = torch.ones_like(long_prompt)
    short = engine.generate(long_prompt[:, :30], attention_mask=mask[:, :30], do_sample=False)
    assert torch.equal(short, eager.generate(long_prompt[:, :30], attention_mask=mask[:, :30], do_sample=False))
    refused, tokens = False, long_prompt
    try:
        tokens = engine.generate(long_prompt, attention_mask=mask, do_sample=False)
    except ValueError:
        refused = True
    assert refused or tokens.shape[1] <= MAX_POSITIONS


def test_embeddings_are_counted_as_tokens(engine: zinfer.InferenceEngine) -> None:
    before = moved(engine)
    with pytest.raises(ValueError, match="120 input tokens and 9 new ones"):
        engine.generate(inputs_embeds=torch.zeros(1, 120, 64), max_new_tokens=9)
    assert moved(engine) == before


def test_the_last_position_is_usable(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, long_prompt: torch.Tensor
) -> None:
    options = {"attention_mask": torch.ones_like(long_prompt), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(engine.generate(long_prompt, **options), eager.generate(long_prompt, **options))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(engine: zinfer.InferenceEngine, eager: PreTrainedModel, side: str) -> None:
    """122 columns, at most 118 of them text."""
    ids = torch.randint(2, 131, (2, 122), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    padding = slice(None, 4) if side == "left" else slice(-4, None)
    ids[:, padding], mask[:, padding] = 1, 0
    options = {"input_ids": ids, "attention_mask": mask, "do_sample": False}
    assert torch.equal(engine.generate(**options, max_new_tokens=10), eager.generate(**options, max_new_tokens=10))
    with pytest.raises(ValueError, match="118 input tokens and 11 new ones"):
        engine.generate(**options, max_new_tokens=11)


def test_max_out_tokens(folder: Path, eager: PreTrainedModel) -> None:
    with engine_in(folder, "disk", max_out_tokens=12) as engine:
        before = moved(engine)
        with pytest.raises(ValueError, match=r"5 input tokens and 8 new ones exceed .*max_out_tokens.*12"):
            greedy(engine, max_new_tokens=8)
        with pytest.raises(ValueError, match=r"13 input tokens .*max_out_tokens.*12"):
            engine.generate(torch.full((1, 13), 5), max_new_tokens=1)
        assert moved(engine) == before
        assert torch.equal(greedy(engine, max_new_tokens=7), greedy(eager, max_new_tokens=7))


def test_gpt2_has_an_end_too(tmp_path: Path) -> None:
    """Learned positions: one more would be an index out of range."""
    folder = tiny_checkpoint("gpt2", tmp_path / "gpt2", num_layers=2)
    with engine_in(folder, "disk") as engine:
        ids = torch.full((1, 120), 7)
        with pytest.raises(ValueError, match=r"120 input tokens and 9 new ones exceed the model's positions \(128\)"):
            engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9)
        assert engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8).shape == (1, 128)


class Raised(Exception):
    """What a test's hook raises."""


@pytest.mark.parametrize("error", [Raised, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", [0, 3, NUM_LAYERS - 1, "lm_head"])
def test_an_exception_in_the_middle_leaves_the_engine_exact(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, error: type[BaseException], when: str, place: int | str
) -> None:
    expected = greedy(eager)
    module = engine.module.lm_head if place == "lm_head" else engine.module.model.layers[place].mlp

    def fail(*args: object) -> None:
        raise error

    hook = module.register_forward_pre_hook(fail) if when == "before" else module.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(error):
            greedy(engine)
    hook.remove()
    for _ in range(2):
        assert torch.equal(greedy(engine), expected)
    layer = engine.module.model.layers[NUM_LAYERS - 1]
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_a_failed_pass_leaves_no_block_bound(folder: Path) -> None:
    """Until the next call too: the slot of the block that failed will hold another's bytes."""
    with engine_in(folder, "disk") as engine:

        def fail(*args: object) -> None:
            raise Raised

        engine.module.model.layers[2].mlp.register_forward_pre_hook(fail)
        with pytest.raises(Raised):
            greedy(engine)
        assert all(parameter.is_meta for parameter in engine.module.parameters())


def test_a_call_from_within_a_hook_is_refused_or_exact(folder: Path, eager: PreTrainedModel) -> None:
    """A hook that asks the engine something must not deadlock it."""
    with engine_in(folder, "host", 3) as engine:
        answers: list[torch.Tensor] = []

        def ask(*args: object) -> None:
            hook.remove()
            answers.append(logits_of(engine))

        hook = engine.module.model.layers[1].mlp.register_forward_pre_hook(ask)
        outcome: list[object] = []

        def call() -> None:
            try:
                outcome.append(logits_of(engine))
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(20)
        assert outcome, "the engine waits for itself"
        expected = logits_of(eager)
        if not isinstance(outcome[0], Exception):
            assert torch.equal(outcome[0], expected)  # type: ignore[arg-type]
            assert torch.equal(answers[0], expected)
        assert torch.equal(logits_of(engine), expected)


def test_two_threads_at_once_both_get_their_own_answers(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    prompts = [torch.tensor([prompt]) for prompt in random_prompts(4, seed=31)]
    expected = [greedy(eager, input_ids=ids, max_new_tokens=8) for ids in prompts]
    found: dict[tuple[int, int], torch.Tensor] = {}
    failures: list[BaseException] = []
    together = threading.Barrier(4)

    def work(index: int) -> None:
        together.wait()
        try:
            for turn in range(3):
                found[index, turn] = greedy(engine, input_ids=prompts[index], max_new_tokens=8)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(found) == 12
    assert all(torch.equal(tokens, expected[index]) for (index, _), tokens in found.items())


@pytest.mark.parametrize("homes", ["disk", "mixed"])
def test_a_file_cut_short_while_running(folder: Path, eager: PreTrainedModel, tmp_path: Path, homes: str) -> None:
    own = shutil.copytree(folder, tmp_path / "model")
    shards = sorted(own.glob("*.safetensors"))
    expected = greedy(eager)
    with engine_in(own, homes) as engine:
        assert torch.equal(greedy(engine), expected)
        saved = {shard: shard.read_bytes() for shard in shards}
        for shard in shards:
            os.truncate(shard, 5000)
        for _ in range(2):
            with pytest.raises(DiskReadError, match=r"safetensors: reading at byte \d+: the file ends after") as caught:
                greedy(engine)
            assert Path(caught.value.filename) in shards
            assert caught.value.errno
            assert caught.value.offset >= 0
        for shard, content in saved.items():
            shard.write_bytes(content)
        for _ in range(2):
            assert torch.equal(greedy(engine), expected)


def test_an_io_error_while_loading_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, descriptors = settled_threads(), open_descriptors()
    real = os.preadv
    calls = []

    def preadv(fd: int, buffers: object, offset: int, *flags: int) -> int:
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    for homes in ("resident", "host"):
        calls.clear()
        with pytest.raises(DiskReadError, match=r"safetensors: reading at byte \d+: Input/output error"):
            zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu"))
    gc.collect()
    assert settled_threads() == threads
    assert open_descriptors() == descriptors


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled_threads() -> int:
    """Threads once those that are ending have ended."""
    for _ in range(50):
        found = threading.active_count()
        time.sleep(0.01)
        if threading.active_count() == found:
            break
    return threading.active_count()


@pytest.mark.parametrize("homes", HOMES)
def test_destroy_leaves_no_thread_and_no_file(folder: Path, homes: str) -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    engine = zinfer.init_inference(folder, config_for(folder, homes, 3, "cpu"))
    greedy(engine)
    engine.destroy()
    assert set(threading.enumerate()) <= threads
    assert open_descriptors() == descriptors
    engine.destroy()
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("homes", ["host", "disk"])
def test_destroy_before_the_first_use(folder: Path, homes: str) -> None:
    threads = set(threading.enumerate())
    zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu")).destroy()
    assert set(threading.enumerate()) <= threads


def test_destroy_while_another_thread_generates(folder: Path, eager: PreTrainedModel) -> None:
    """It waits for the call, or the call fails with a clear error; it never frees what is read."""
    engine = zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu"))
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(greedy(engine, max_new_tokens=60))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    engine.destroy()
    thread.join(30)
    assert outcome
    if isinstance(outcome[0], Exception):
        assert "destroyed" in str(outcome[0])
    else:
        assert torch.equal(outcome[0], greedy(eager, max_new_tokens=60))  # type: ignore[arg-type]


@pytest.mark.parametrize("homes", HOMES)
def test_use_after_destroy_is_an_error(folder: Path, homes: str) -> None:
    engine = zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu"))
    module = engine.module
    greedy(engine)
    engine.destroy()
    for use in (lambda: greedy(engine), lambda: engine(PROMPT), lambda: engine.forward(PROMPT)):
        with pytest.raises(RuntimeError, match=r"destroyed.*zinfer\.init_inference"):
            use()
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("homes", HOMES)
def test_the_module_of_a_destroyed_engine_answers_nothing(folder: Path, homes: str) -> None:
    """A name kept for `engine.module` must not answer from memory that was given back."""
    engine = zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu"))
    module = engine.module
    engine.destroy()
    with pytest.raises((RuntimeError, NotImplementedError)):
        print(greedy(module))
    with pytest.raises((RuntimeError, NotImplementedError)):
        print(module.lm_head(torch.ones(1, 64)))


def test_twenty_engines_leave_nothing(folder: Path) -> None:
    configs = [config_for(folder, homes, 2, "cpu") for homes in HOMES]
    zinfer.init_inference(folder, configs[0]).destroy()
    threads, descriptors, mapped = settled_threads(), open_descriptors(), len(Path("/proc/self/maps").read_bytes())
    for index in range(20):
        engine = zinfer.init_inference(folder, configs[index % len(configs)])
        engine(PROMPT)
        engine.destroy()
    assert settled_threads() == threads
    assert open_descriptors() == descriptors
    del engine
    gc.collect()
    assert len(Path("/proc/self/maps").read_bytes()) < mapped + 20_000


def test_an_engine_that_is_dropped_is_collected(folder: Path) -> None:
    """Forgetting `destroy` must not keep threads and files for the rest of the process."""
    threads, descriptors = settled_threads(), open_descriptors()
    for _ in range(3):
        engine = zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu"))
        greedy(engine)
        del engine
        gc.collect()
    assert settled_threads() == threads
    assert open_descriptors() == descriptors


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("homes", ["resident", "host"])
def test_memory_is_given_back(tmp_path: Path, homes: str) -> None:
    model = tiny_model("llama", num_layers=1)
    model.config.intermediate_size = 60_000
    with torch.device("meta"):
        wide = type(model)(model.config)
    tensors = {
        name: torch.full(parameter.shape, 0.01) for name, parameter in wide.named_parameters(remove_duplicate=False)
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert total > 40e6
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors, wide, model
    gc.collect()
    offload = {"zero_optimization": {"offload_param": {"device": "none" if homes == "resident" else "cpu"}}}
    zinfer.init_inference(tmp_path, offload, device="cpu").destroy()
    before = resident_bytes()
    engine = zinfer.init_inference(tmp_path, offload, device="cpu")
    module = engine.module
    engine(PROMPT)
    held = resident_bytes() - before
    assert held > 0.7 * total
    engine.destroy()
    gc.collect()
    assert resident_bytes() - before < 0.2 * total, "while the engine and its module are still referred to"
    assert module is engine.module


def test_the_counters(folder: Path, batch: Tensors) -> None:
    for homes in HOMES:
        with engine_in(folder, homes) as engine:
            history = [engine.stats()]
            assert history[0].passes == 0
            assert history[0].wall_s == 0
            for _ in range(3):
                start_s = time.perf_counter()
                engine.generate(**batch, max_new_tokens=3, do_sample=False)
                elapsed_s = time.perf_counter() - start_s
                history.append(engine.stats())
                assert 0 < history[-1].wall_s - history[-2].wall_s <= elapsed_s
            for earlier, later in itertools.pairwise(history):
                check_types(later)
                assert later.passes == earlier.passes + 3
                assert later.bytes_read_disk >= earlier.bytes_read_disk
                assert later.bytes_to_device >= earlier.bytes_to_device
                assert all(later.stall_s[cause] >= earlier.stall_s[cause] >= 0 for cause in earlier.stall_s)
                assert later.streamed_bytes_per_pass == earlier.streamed_bytes_per_pass == engine.plan.streamed_bytes
                assert sum(later.stall_s.values()) <= later.wall_s


def check_types(stats: RunStats) -> None:
    assert dataclasses.is_dataclass(stats)
    for name in ("bytes_read_disk", "bytes_to_device", "pinned_bytes", "device_bytes", "host_bytes", "passes"):
        assert type(getattr(stats, name)) is int
        assert getattr(stats, name) >= 0
    assert type(stats.wall_s) is float
    assert set(stats.blocks_by_home) == {"DEVICE", "HOST", "DISK"}
    assert {"disk", "link"} <= set(stats.stall_s)
    assert all(type(seconds) is float for seconds in stats.stall_s.values())


def test_stats_are_the_callers_own(engine: zinfer.InferenceEngine) -> None:
    stats = engine.stats()
    stats.blocks_by_home["DISK"] = 99
    stats.stall_s["disk"] = -1.0
    assert engine.stats().blocks_by_home["DISK"] != 99
    assert engine.stats().stall_s["disk"] >= 0


def test_stats_may_be_asked_for_while_it_generates(folder: Path) -> None:
    """A heartbeat beside a call that takes hours must not wait for its end."""
    with engine_in(folder, "disk") as engine:
        inside, go_on = threading.Event(), threading.Event()

        def pause(*args: object) -> None:
            inside.set()
            go_on.wait(20)

        engine.module.model.layers[2].mlp.register_forward_pre_hook(pause)
        worker = threading.Thread(target=lambda: greedy(engine, max_new_tokens=2))
        asker = threading.Thread(target=lambda: engine.stats())
        worker.start()
        assert inside.wait(20)
        asker.start()
        asker.join(2)
        answered = not asker.is_alive()
        go_on.set()
        worker.join(20)
        asker.join(20)
        assert answered


def test_a_failed_call_counts_its_time_and_no_whole_pass_too_many(folder: Path) -> None:
    with engine_in(folder, "disk") as engine:
        greedy(engine, max_new_tokens=2)
        before = engine.stats()

        def fail(*args: object) -> None:
            raise Raised

        hook = engine.module.model.layers[3].register_forward_pre_hook(fail)
        with pytest.raises(Raised):
            greedy(engine)
        hook.remove()
        after = engine.stats()
        assert after.wall_s > before.wall_s
        assert after.passes - before.passes in (0, 1)


def test_the_synchronous_twin_moves_nothing_ahead(folder: Path, eager: PreTrainedModel) -> None:
    with engine_in(folder, "disk", synchronous=True) as engine:
        before = settled(engine)
        assert torch.equal(logits_of(engine), logits_of(eager))
        after = settled(engine)
        assert after.bytes_to_device - before.bytes_to_device == after.streamed_bytes_per_pass
        assert after.stall_s["disk"] > before.stall_s["disk"]


def within(timeout_s: float, run: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """What ``run`` gives on another thread, or None when it fails or does not end in time."""
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else None


def interrupted(run: Callable[[], object], after_s: float) -> bool:
    """Whether Ctrl-C came before ``run`` was done."""

    def ring(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        run()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return False


@pytest.mark.parametrize("homes", ["disk", "host"])
def test_ctrl_c_at_any_moment(folder: Path, eager: PreTrainedModel, homes: str) -> None:
    expected = greedy(eager)
    with engine_in(folder, homes, 3) as engine:
        start_s = time.perf_counter()
        assert torch.equal(greedy(engine), expected)
        full_s = time.perf_counter() - start_s
        hits = 0
        for index in range(25):
            hits += interrupted(lambda: greedy(engine), after_s=full_s * (0.02 + 0.037 * index))
            tokens = within(20, lambda: greedy(engine))
            assert tokens is not None, f"after {hits} interrupts the engine hangs or fails"
            assert torch.equal(tokens, expected)
        assert hits >= 8
