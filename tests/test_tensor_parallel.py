"""Ranks that divide each layer compute what one process does, and read and keep a part each."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from checkpoints import tiny_checkpoint, tiny_mixtral
from family_models import CASES, Tensors, family_inputs, family_model, forward_inputs, outputs_of
from ranks_support import Failed, Ranks, run_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zinfer
from zinfer.errors import ConfigError, RankError
from zinfer.offload.stats import RunStats

Found = tuple[Tensors, torch.Tensor | None, RunStats]
IDS = torch.tensor([[2, 7, 90, 33, 12, 64, 130], [2, 7, 11, 33, 12, 5, 99]])
NUM_LAYERS = 6
MOST_ERROR = 1e-5
ROUNDED = {"BartModel": 2e-5}
"""A model of which one process is itself 2e-5 from float64."""


def config(size: int, homes: str = "cpu", bits: int | None = None, nvme_path: Path | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"device": "cpu"}
    if bits is not None:
        options["quantization"] = {"bits": bits, "group_size": 16} if bits == 4 else {"bits": bits}
    offload = {"device": homes} | ({"nvme_path": str(nvme_path)} if nvme_path else {})
    tensor = {"tensor_parallel": {"tp_size": size}}
    return {"zero_optimization": {"offload_param": offload}, "zinfer": options, **tensor}


def computed(rank: int, jobs: list[tuple[Path, dict[str, Any], Tensors]]) -> list[Found]:
    """Outputs, greedy tokens and stats of each job, one engine after the other."""
    found: list[Found] = []
    for folder, settings, inputs in jobs:
        engine = zinfer.init_inference(folder, settings)
        try:
            with torch.no_grad():
                given = forward_inputs(engine.module, inputs)
                outputs = {name: each.to("cpu", copy=True) for name, each in outputs_of(engine(**given)).items()}
                tokens = None
                if engine.module.can_generate():
                    tokens = engine.generate(**inputs, max_new_tokens=6, do_sample=False).cpu()
            found.append((outputs, tokens, engine.stats()))
        finally:
            engine.destroy()
    return found


def error_of(found: Tensors, wanted: Tensors) -> float:
    """The largest difference, as a share of the largest number."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in wanted.items())


def check_alike(
    several: list[list[Found]], alone: list[Found], names: list[str], most_error: float = MOST_ERROR
) -> None:
    for at, name in enumerate(names):
        outputs, tokens, _ = alone[at]
        for ranks in several:
            assert error_of(ranks[at][0], outputs) <= ROUNDED.get(name, most_error), name
            assert tokens is None or torch.equal(ranks[at][1], tokens), name  # type: ignore[arg-type]
            assert all(torch.equal(ranks[at][0][each], several[0][at][0][each]) for each in outputs), name


def check_families(folder: Path, wanted: list[str], size: int) -> None:
    jobs = []
    for family, class_name in CASES:
        if class_name in wanted:
            model = family_model(family.model_type, class_name)
            model.save_pretrained(folder / class_name)
            jobs.append((folder / class_name, family_inputs(model)))
    assert len(jobs) == len(wanted)
    alone = computed(0, [(path, config(1), inputs) for path, inputs in jobs])
    several = run_ranks(size, computed, [(path, config(size), inputs) for path, inputs in jobs])
    check_alike(several, alone, [path.name for path, _ in jobs])


@pytest.mark.slow
def test_plans_and_fused_products_on_four_ranks(tmp_path: Path) -> None:
    """Two heads of keys on four ranks, biases, experts, and all orders of fused products; 131 tokens."""
    names = ["Qwen2ForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel", "FalconForCausalLM"]
    check_families(tmp_path, names, 4)


@pytest.mark.slow
def test_own_plans_on_two_ranks(tmp_path: Path) -> None:
    names = [f"{each}ForCausalLM" for each in ("Bloom", "OPT", "GptOss", "DeepseekV3")]
    check_families(tmp_path, [*names, "BertForMaskedLM", "T5ForConditionalGeneration"], 2)


PAIRS = ("Blenderbot", "BlenderbotSmall", "M2M100", "MBart", "Marian", "PLBart", "Pegasus")
"""Encoder-decoders with BART's names of layers."""


def tiny_pair(name: str) -> Any:
    sizes = {f"{part}_{each}": 2 for part in ("encoder", "decoder") for each in ("layers", "attention_heads")}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    tokens |= {"vocab_size": 61, "decoder_vocab_size": 61, "forced_eos_token_id": None}
    torch.manual_seed(0)
    kind = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes, **tokens)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


def translated(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two texts, one padded, and the tokens that follow from the first by beams."""
    ids = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 1, 1]])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=(ids != 1).long(), decoder_input_ids=ids[:, :3]).logits.clone()
    return logits, model.generate(ids[:1], max_new_tokens=6, num_beams=2, do_sample=False)


def pairs_divided(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for name in PAIRS:
        engine = zinfer.init_inference(tiny_pair(name), mp_size=2, dtype=torch.float32, device="cpu")
        found.append(translated(engine))
        engine.destroy()
    return found


@pytest.mark.slow
def test_translators_on_two_ranks() -> None:
    """Modules in memory, as automatic tensor parallelism is given them."""
    alone = [translated(tiny_pair(name)) for name in PAIRS]
    for found in run_ranks(2, pairs_divided):
        for name, (logits, tokens), (wanted, same) in zip(PAIRS, found, alone, strict=True):
            assert torch.allclose(logits, wanted, rtol=1e-3, atol=1e-4), name
            assert torch.equal(tokens, same), name


@pytest.mark.slow
def test_uneven_heads_on_three_ranks(tmp_path: Path) -> None:
    """Four heads, and 131 tokens, of which the last rank has less."""
    check_families(tmp_path, ["GPT2LMHeadModel", "BloomForCausalLM", "MptForCausalLM", "T5EncoderModel"], 3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_class(tmp_path: Path, size: int) -> None:
    check_families(tmp_path, [class_name for _, class_name in CASES], size)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS, tie=False)


@pytest.fixture(scope="module")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A decoder, one with Conv1D whose embedding is the head's too, and a mixture."""
    mixture = tmp_path_factory.mktemp("mixtral")
    tiny_mixtral().save_pretrained(mixture)
    return [llama, tiny_checkpoint("gpt2", tmp_path_factory.mktemp("gpt2"), num_layers=3), mixture]


def test_homes_and_codes(folders: list[Path], tmp_path: Path) -> None:
    """INT4's groups coincide with one process's; INT8's scales are of a rank's columns, so errors are alike."""
    llama, gpt2, mixtral = folders
    cases = [(llama, "none", None), (gpt2, "nvme", None), (mixtral, "nvme", 4), (gpt2, "cpu", 4), (llama, "cpu", 8)]
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}

    def jobs(size: int) -> list[tuple[Path, dict[str, Any], Tensors]]:
        several = [(folder, homes, bits, bits and homes == "nvme") for folder, homes, bits in cases]
        return [
            (folder, config(size, homes, bits, tmp_path / "nvme" if is_kept else None), inputs)
            for folder, homes, bits, is_kept in several
        ]

    alone = computed(0, jobs(1))
    several = run_ranks(2, computed, jobs(2))
    exact = [at for at, (_, _, bits) in enumerate(cases) if bits != 8]
    names = [f"{cases[at][0].name}, {cases[at][1:]}" for at in exact]
    check_alike([[ranks[at] for at in exact] for ranks in several], [alone[at] for at in exact], names)
    for at in set(range(len(cases))) - {*exact}:
        ((full, _, _),) = computed(0, [(cases[at][0], config(1), inputs)])
        assert 0 < error_of(several[0][at][0], full) < 1.5 * error_of(alone[at][0], full), cases[at]
    kept = sorted(name.removeprefix(mixtral.name) for name in os.listdir(tmp_path / "nvme"))
    assert {name[-7:] for name in kept} >= {"-0-of-2", "-1-of-2"}, kept


@pytest.mark.slow
def test_each_rank_reads_keeps_and_streams_its_part(llama: Path, tmp_path: Path) -> None:
    inputs = {"input_ids": IDS}
    homes = ("cpu", "nvme", "none")
    one = computed(0, [(llama, config(1, each), inputs) for each in homes])
    jobs = [(llama, config(2, each), inputs) for each in homes]
    found = run_ranks(2, computed, [*jobs, (llama, config(2, "nvme", None, tmp_path), inputs)])
    norms_bytes = (2 * NUM_LAYERS + 1) * 64 * 4
    slack_bytes = norms_bytes + 256 * (9 * NUM_LAYERS + 3)
    for at, each in enumerate(homes):
        whole = one[at][2]
        for ranks in found:
            own = ranks[at][2]
            assert abs(own.loaded_bytes - whole.loaded_bytes / 2) <= slack_bytes, each
            assert abs(own.streamed_bytes_per_pass - whole.streamed_bytes_per_pass / 2) <= slack_bytes, each
            assert abs(own.disk_bytes_per_pass - whole.disk_bytes_per_pass / 2) <= slack_bytes, each
            assert own.gathered_bytes == 0
            assert own.blocks_by_home == whole.blocks_by_home
    for ranks in found:
        assert ranks[3][2].bytes_read_disk <= 0.52 * one[1][2].bytes_read_disk, "columns are kept apart under nvme_path"
        assert error_of(ranks[3][0], one[1][0]) <= MOST_ERROR
    assert found[0][0][2].host_bytes <= one[0][2].host_bytes / 2 + slack_bytes
    assert found[0][2][2].device_bytes <= one[2][2].device_bytes / 2 + slack_bytes


def in_memory(rank: int, folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits and sampled tokens of a module with its weights, whose random numbers begin elsewhere on each rank."""
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = zinfer.init_inference(module, config(size))
    try:
        logits = engine(IDS).logits.clone()
        torch.manual_seed(3 if rank == 0 else 77)
        tokens = engine.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=True)
        return logits, tokens, module.config.num_attention_heads
    finally:
        engine.destroy()
        assert module.config.num_attention_heads == 4, "the config is the caller's again"


def test_a_module_in_memory_is_divided_and_samples_alike(llama: Path) -> None:
    logits, tokens, _ = in_memory(0, llama, 1)
    for found, sampled, num_heads in run_ranks(2, in_memory, llama, 2):
        assert error_of({"logits": found}, {"logits": logits}) <= MOST_ERROR
        assert torch.equal(sampled, tokens)
        assert num_heads == 2


def other_sizes(rank: int, folder: Path) -> list[str]:
    """What is said of other sizes than that of the group."""
    said = []
    for size in (4, 2):
        try:
            zinfer.init_inference(folder, config(size))
        except ConfigError as error:
            said.append(str(error))
    dist.barrier()  # torch's group may wait, as it is left, for a rank that left it before
    return said


def test_sizes_that_cannot_be_are_refused(llama: Path) -> None:
    for said in run_ranks(3, other_sizes, llama):
        for size, message in zip((4, 2), said, strict=True):
            wanted = (
                f'zinfer.parallel = {{"tensor": {size}}} (tensor_parallel.tp_size) needs {size} ranks, and there are 3;'
            )
            assert message.startswith(wanted)
    (said,) = {str(found.text.splitlines()[-1]) for found in Ranks(3, computed, [(llama, config(3), {})]).results()}
    assert "tensor_parallel.tp_size = 3 does not divide 4 attention heads and 2 of keys and values; " in said
    assert said.endswith("sizes that do are 1, 2, 4")


def unequal(rank: int, folder: Path) -> tuple[str, str]:
    """Calls with the same inputs, and then with others on each rank."""
    engine = zinfer.init_inference(folder, config(2))
    engine(IDS)
    with pytest.raises(ConfigError, match="output_attentions gives the attentions of one rank's heads, not of all"):
        engine.generate(IDS, output_attentions=True, return_dict_in_generate=True)
    engine(IDS)
    try:
        engine(IDS + rank)
        return "computed", ""
    except RankError as error:
        return type(error).__name__, str(error)
    finally:
        engine.destroy()


def test_unequal_inputs_are_an_error_on_all_ranks(llama: Path) -> None:
    for kind, said in run_ranks(2, unequal, llama):
        assert kind == "RankError"
        assert "forward: rank 1 was given other arguments than rank 0" in said


def failing(rank: int, folder: Path) -> str:
    """Rank 1 fails within a forward, after the first layers' sums."""
    engine = zinfer.init_inference(folder, config(2))

    def fail(*args: object) -> None:
        raise MemoryError("no more")

    if rank == 1:
        engine.layers[3].get_submodule("mlp").register_forward_pre_hook(fail)
    try:
        engine(IDS)
        return "computed"
    except (RankError, MemoryError) as error:
        return str(error)
    finally:
        engine.destroy()


@pytest.mark.slow
def test_a_rank_that_fails_within_a_forward_ends_the_others(llama: Path) -> None:
    first, second = run_ranks(2, failing, llama)
    assert "rank 1" in first
    assert "MemoryError: no more" in first
    assert second == "no more"


def long_run(rank: int, folder: Path, begun: Path) -> None:
    engine = zinfer.init_inference(folder, config(2, "nvme"))
    while True:
        try:
            engine(IDS)
            (begun / str(rank)).touch()
        except RankError as failure:
            (begun / f"said-{rank}").write_text(str(failure))
            engine.destroy()
            return


@pytest.mark.slow
@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_others(llama: Path, tmp_path: Path, lost: int) -> None:
    with Ranks(2, long_run, llama, tmp_path) as ranks:
        ranks.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        ranks.kill(lost, signal.SIGKILL)
        found = ranks.results()
    assert not isinstance(found[1 - lost], Failed)
    assert f"rank {lost}" in (tmp_path / f"said-{1 - lost}").read_text()


def texts(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[list[tuple[tuple[int, ...], list[Any]]], int]:
    """Continuous batching with more prompts than a pass holds, some of them scored; the same calls on all ranks."""
    params = [
        zinfer.SamplingParams(
            max_new_tokens=4 + number,
            temperature=number % 2,
            seed=7,
            prompt_logprobs=2 if number in (4, 5) else None,
        )
        for number in range(6)
    ]
    prompts = [{"prompt_token_ids": IDS[number % 2, : 2 + number].tolist()} for number in range(6)]
    with zinfer.LLM(folder, settings, tokens_per_pass=16) as llm:
        found = [
            (each.token_ids, [score.top_ids for score in (each.prompt_logprobs or ())[1:] if score is not None])
            for each in llm.generate(prompts, params)
        ]
        return found, llm.stats().streamed_bytes_per_pass


@pytest.mark.slow
def test_batches_are_continued_by_divided_layers(folders: list[Path]) -> None:
    for folder in folders:
        wanted, whole_bytes = texts(0, folder, config(1))
        for found, streamed_bytes in run_ranks(2, texts, folder, config(2)):
            assert found == wanted, folder.name
            assert [len(scores) for _, scores in found] == [0, 0, 0, 0, 5, 6]
            assert streamed_bytes < 0.6 * whole_bytes


@pytest.mark.gpu
def test_ranks_on_a_gpu_divide_layers(folders: list[Path]) -> None:
    def on_gpu(size: int, homes: str) -> dict[str, Any]:
        return config(size, homes) | {"zinfer": {"device": "cuda", "max_weight_memory": "4GB"}}

    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    cases = [(folder, homes) for folder in folders for homes in ("cpu", "none")]
    alone = computed(0, [(folder, on_gpu(1, homes), inputs) for folder, homes in cases])
    several = run_ranks(2, computed, [(folder, on_gpu(2, homes), inputs) for folder, homes in cases])
    check_alike(several, alone, [f"{folder.name} {homes}" for folder, homes in cases], 1e-4)
    wanted, _ = texts(0, folders[0], on_gpu(1, "cpu"))
    assert [found for found, _ in run_ranks(2, texts, folders[0], on_gpu(2, "cpu"))] == [wanted] * 2


def replayed(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[list[tuple[int, ...]], int]:
    """Greedy tokens, and how many passes were replayed from CUDA graphs."""
    prompts = [{"prompt_token_ids": IDS[number, : 3 + number].tolist()} for number in range(2)]
    with zinfer.LLM(folder, settings) as llm:
        found = llm.generate(prompts, zinfer.SamplingParams(max_new_tokens=20))
        return [each.token_ids for each in found], llm.graphs.replayed


def many_rows(rank: int, folder: Path, size: int) -> tuple[list[tuple[int, ...]], int, int]:
    """Greedy tokens, and how many passes there were and were replayed, once their forms are known.

    Sums of more than 256 rows are by ranges.
    """
    draw = torch.Generator().manual_seed(0)
    sizes = [20 + at % 60 for at in range(400)]
    prompts = [{"prompt_token_ids": torch.randint(3, 250, (size,), generator=draw).tolist()} for size in sizes]
    params = zinfer.SamplingParams(max_new_tokens=12, ignore_eos=True)
    settings = {"tensor_parallel": {"tp_size": size}, "enable_cuda_graph": True}
    with zinfer.LLM(
        folder, settings, device="cuda", tokens_per_pass=1024, kv_cache_memory="1GB", speculate="off"
    ) as llm:
        for _ in range(3):
            llm.reset_prefix_cache()
            replayed, passes = llm.graphs.replayed, llm.num_passes
            found = [each.token_ids for each in llm.generate(prompts, params)]
        return found, llm.num_passes - passes, llm.graphs.replayed - replayed


@pytest.mark.gpu
def test_many_rows_of_divided_layers_are_replayed(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    wide = LlamaConfig(vocab_size=256, num_hidden_layers=3, **sizes)
    LlamaForCausalLM(wide).save_pretrained(tmp_path)
    wanted, passes, _ = many_rows(0, tmp_path, 1)
    for found, own, num_replayed in run_ranks(2, many_rows, tmp_path, 2):
        alike = sum(one == other for one, other in zip(found, wanted, strict=True))
        assert alike >= 380
        assert own == passes
        assert num_replayed > passes // 2


@pytest.mark.gpu
@pytest.mark.parametrize("homes", ["cpu", "none"])
def test_passes_of_divided_layers_are_replayed(folders: list[Path], homes: str) -> None:
    zinfer_options = {"zinfer": {"device": "cuda", "max_weight_memory": "4GB", "speculate": "off"}}
    wanted, _ = replayed(0, folders[0], config(1, homes) | zinfer_options)
    for found, num_replayed in run_ranks(2, replayed, folders[0], config(2, homes) | zinfer_options):
        assert found == wanted
        assert num_replayed >= 8
