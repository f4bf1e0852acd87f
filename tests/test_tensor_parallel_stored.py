"""Ranks that divide checkpoints of codes: each reads its part of them, and computes what one process does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FRAGMENT_SHAPE, tiny_checkpoint, tiny_mixtral, tiny_model
from family_models import CASES, Tensors, family_inputs, family_model
from ranks_support import run_ranks
from store_support import make_store, write_module
from test_foreign_engine import write_quantized, write_quantized_experts
from test_tensor_parallel import IDS, Found, check_alike, computed, config, error_of, texts
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import zinfer
from zinfer.weights import Checkpoint

NUM_LAYERS = 2
LARGEST_SHARE = {"uneven": 2 / 3}
Job = tuple[Path, dict[str, object], Tensors]


def jobs_of(folders: list[Path], size: int, homes: str = "cpu", nvme_path: Path | None = None) -> list[Job]:
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    return [(folder, config(size, homes, None, nvme_path), inputs) for folder in folders]


def whole_bytes(folder: Path) -> int:
    """Bytes of the weights that every rank has whole."""
    tensors = Checkpoint.open(folder).tensors.values()
    return sum(tensor.nbytes for tensor in tensors if re.search(r"norm|ln_|wpe|gate\.weight", tensor.name))


def check_folders(folders: list[Path], alone: list[Found], size: int, homes: str, nvme_path: Path | None) -> None:
    several = run_ranks(size, computed, jobs_of(folders, size, homes, nvme_path))
    check_alike(several, alone, [folder.name for folder in folders])
    for at, folder in enumerate(folders):
        whole, share = whole_bytes(folder), LARGEST_SHARE.get(folder.name, 1 / size)
        most_bytes = whole + (alone[at][2].loaded_bytes - whole) * (share + 0.06)
        for ranks in several:
            assert ranks[at][2].loaded_bytes < most_bytes, folder.name


def tiny_fragments() -> PreTrainedModel:
    """Two layers whose INT4 matrices lie in fragment order, and do so in halves."""
    torch.manual_seed(0)
    shape = FRAGMENT_SHAPE | {"hidden_size": 512, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of groups."""
    root = tmp_path_factory.mktemp("store")
    llama = tiny_checkpoint("llama", root / "llama", num_layers=NUM_LAYERS, tie=False)
    make_store(llama, root / "llama-int4", bits=4, group_size=16, symmetric=False)
    return root / "llama-int4"


@pytest.fixture(scope="module")
def stores(store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Stores of `zinfer quantize`: groups, whole rows, floats, fragments, experts, and transposed matrices."""
    root, llama = tmp_path_factory.mktemp("stores"), store.with_name("llama")
    mixtral, fragments = write_module(tiny_mixtral(), root / "mixtral"), write_module(tiny_fragments(), root / "large")
    gpt2 = tiny_checkpoint("gpt2", root / "gpt2", num_layers=NUM_LAYERS)
    sections: dict[str, tuple[Path, dict[str, object]]] = {
        "llama-int8": (llama, {"bits": 8}),
        "llama-fp8": (llama, {"bits": 8, "format": "fp8"}),
        "fragments": (fragments, {"bits": 4, "group_size": 64}),
        "mixtral-int4": (mixtral, {"bits": 4, "group_size": 16}),
        "gpt2-int4": (gpt2, {"bits": 4, "group_size": 16}),
    }
    for name, (folder, section) in sections.items():
        make_store(folder, root / name, **section)
    return [store, *(root / name for name in sections)]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Other tools' checkpoints: of a Llama, of experts quantized one by one, and of heads in pairs.

    The last one's six heads share scales in pairs, and its feed-forward has five groups, on two ranks.
    """
    root = tmp_path_factory.mktemp("foreign")
    names = ["gptq", "awq", "compressed-tensors int4", "compressed-tensors int8"]
    for name in names:
        model = tiny_model("llama", num_layers=NUM_LAYERS, tie=False)
        if name == "awq":  # a head of 17 words, so that ranks have 72 and 64 tokens
            model.resize_token_embeddings(136)
        write_quantized(root / name, name, model, 16, full=None if name == "awq" else "lm_head")
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6}
    torch.manual_seed(0)
    write_quantized(root / "uneven", "gptq", LlamaForCausalLM(LlamaConfig(**shape, vocab_size=131)).eval())
    for name in names[::3]:
        write_quantized_experts(root / f"experts {name}", name, tiny_mixtral(), 16)
    return [root / name for name in (*names, *(f"experts {name}" for name in names[::3]), "uneven")]


@pytest.mark.slow
def test_two_ranks_divide_codes(stores: list[Path], foreign: list[Path]) -> None:
    folders = [*stores, *foreign]
    check_folders(folders, computed(0, jobs_of(folders, 1)), 2, "cpu", None)


def injected(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """Texts of continuous batches, and logits of merged products."""
    found, _ = texts(rank, folder, settings)
    engine = zinfer.init_inference(folder, settings, replace_with_kernel_inject=True)
    try:
        return found, engine(IDS).logits.clone()
    finally:
        engine.destroy()


def test_batches_and_merged_products(store: Path) -> None:
    wanted, logits = injected(0, store, config(1))
    for found, own in run_ranks(2, injected, store, config(2)):
        assert found == wanted
        assert error_of({"logits": own}, {"logits": logits}) <= 1e-5


def test_four_ranks_divide_codes_for_the_disk(store: Path, tmp_path: Path) -> None:
    """Each rank's part of what is converted, or cut by columns, is kept for it alone."""
    write_quantized(
        tmp_path / "gptq", "gptq", tiny_model("llama", num_layers=NUM_LAYERS, tie=False), 16, full="lm_head"
    )
    folders = [store, tmp_path / "gptq"]
    check_folders(folders, computed(0, jobs_of(folders, 1)), 4, "nvme", tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 4 * len(folders)


def ordered_jobs(folder: Path, store: Path, size: int) -> list[Job]:
    """In host memory, and kept for the disk."""
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    wanted = [config(size, "cpu"), config(size, "nvme", None, store)]
    return [(folder, each, inputs) for each in wanted]


def in_activation_order(
    rank: int, folders: list[Path], store: Path, parts: Path
) -> tuple[list[Found], list[Found], Any]:
    """Outputs of each, those of parts that were kept, and texts of continuous batches."""
    jobs = [job for folder in folders for job in ordered_jobs(folder, store, 2)]
    zinfer.init_inference(folders[0], {**config(2), "save_mp_checkpoint_path": str(parts)}).destroy()
    return computed(rank, jobs), computed(rank, [(parts, *jobs[0][1:])]), texts(rank, folders[0], config(2))


@pytest.mark.slow
def test_groups_of_columns_in_activation_order(tmp_path: Path) -> None:
    """Of three groups one rank has two; six heads, of which either has three, are 96 columns."""
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6}
    torch.manual_seed(0)
    uneven = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=131)).eval()
    write_quantized(tmp_path / "llama", "gptq in activation order", None, 16)
    write_quantized(tmp_path / "uneven", "gptq in activation order", uneven)
    folders = [tmp_path / "llama", tmp_path / "uneven"]
    alone = computed(0, [job for folder in folders for job in ordered_jobs(folder, tmp_path / "one", 1)])
    several = run_ranks(2, in_activation_order, folders, tmp_path / "nvme", tmp_path / "parts")
    check_alike([found for found, _, _ in several], alone, ["llama", "llama, nvme", "uneven", "uneven, nvme"])
    check_alike([kept for _, kept, _ in several], alone[:1], ["parts"])
    tokens, whole_bytes = texts(0, folders[0], config(1))
    for found, kept, (own_tokens, own_bytes) in several:
        assert own_tokens == tokens
        assert own_bytes < 0.6 * whole_bytes
        for place in (0, 1):
            assert found[place][2].streamed_bytes_per_pass < 0.6 * alone[place][2].streamed_bytes_per_pass
        assert kept[0][2].loaded_bytes < 0.6 * alone[0][2].loaded_bytes, "a part that was kept is read alone"
    # A store of the whole model, which the first start on one rank has written, is cut in the order of groups.
    (store,) = (folder for folder in (tmp_path / "one").iterdir() if folder.name.startswith("llama"))
    inputs = ordered_jobs(store, tmp_path / "of-store", 2)[0][2]
    again = run_ranks(2, computed, [(store, config(2, "cpu"), inputs)])
    check_alike(again, alone[:1], ["store"])
    assert all(found[0][2].loaded_bytes < 0.6 * alone[0][2].loaded_bytes for found in again)


@pytest.mark.slow
def test_every_family_in_groups_of_eight(tmp_path: Path) -> None:
    """Fused, interleaved and transposed products, and experts; T5 is itself 1.2e-4 from float64, mT5 and BART 1e-5."""
    names, inputs = dict[str, float](), []
    for family, class_name in {family.model_type: (family, class_name) for family, class_name in CASES}.values():
        model = family_model(family.model_type, class_name)
        model.save_pretrained(tmp_path / "full" / class_name)
        make_store(tmp_path / "full" / class_name, tmp_path / class_name, bits=4, group_size=8)
        names[class_name] = 3e-5 if family.model_type in ("t5", "mt5", "bart") else 1e-5
        inputs.append(family_inputs(model))
    one, two = (
        [(tmp_path / name, config(size), own) for name, own in zip(names, inputs, strict=True)] for size in (1, 2)
    )
    alone, several = computed(0, one), run_ranks(2, computed, two)
    for at, (name, most_error) in enumerate(names.items()):
        check_alike([[ranks[at]] for ranks in several], [alone[at]], [name], most_error)
