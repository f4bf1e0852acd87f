"""How layers are cut for ranks: the bytes of ranges in files, heads, and what is refused."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_model
from family_models import CASES, family_model
from safetensors.torch import save_file
from store_support import make_store
from test_foreign_engine import write_quantized
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from zinfer.config.values import BlockClass
from zinfer.errors import ConfigError
from zinfer.model.build import build_meta_model
from zinfer.model.families import FAMILIES
from zinfer.model.matching import match_weights
from zinfer.model.sharding.cut import Cut, Shard
from zinfer.model.sharding.grain import Grain
from zinfer.model.sharding.heads import Heads
from zinfer.model.sharding.plans import find_plan
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.sharding.weights import CutTensor
from zinfer.nvme.reader import Reader
from zinfer.offload.block import Block, SlabLayout, SlabTensor
from zinfer.offload.chunks import covered_bytes
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.source import DiskSource
from zinfer.offload.staging import StagingRing
from zinfer.offload.stream import HostStream
from zinfer.offload.transfer import Target, Transfer
from zinfer.offload.transfer_lane import TransferLane
from zinfer.weights import Checkpoint, JoinedTensor
from zinfer.weights.quantized import find_stored_scheme


def read_cut(weight: CutTensor, dtype: torch.dtype, staging_bytes: int) -> torch.Tensor:
    """What a slab holds after a read through staging slots of that size."""
    layout = SlabLayout.place([SlabTensor("first", torch.uint8, (3,)), SlabTensor("cut", dtype, weight.shape)])
    place = layout.tensors[1]
    block = Block(0, "block", layout, tuple(weight.extents(place)))
    slab = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    ring, stream = StagingRing(), HostStream()
    for _ in range(2):
        ring.add(HostBuffer(staging_bytes, pin=False))
    reader = Reader(block_bytes=4096)
    lane = TransferLane("disk", stream, ring)
    try:
        transfer = Transfer("block", DiskSource(block, reader, staging_bytes), Target(slab, stream))
        lane.submit(transfer)
        transfer.raise_failure()
        assert transfer.source.wire_bytes == sum(extent.nbytes for extent in block.extents)
    finally:
        lane.close()
        reader.close()
        ring.close()
    assert bool((slab[: place.offset] == 255).all()), "only the tensor's own bytes are written"
    return place.view(slab).clone()


CUTS = (
    ((37, 20), Cut(0, ((5, 30),))),
    ((37, 20), Cut(1, ((3, 11),))),
    ((50, 300), Cut(1, ((0, 100), (120, 140), (299, 300)))),
    ((6, 40, 30), Cut(1, ((2, 9), (30, 31)))),
    ((6, 40, 30), Cut(2, ((7, 30),))),
    ((3, 5, 40_000), Cut(2, ((10_000, 30_000),))),  # gaps that are not read over
    ((1000,), Cut(0, ((0, 10), (990, 1000)))),
)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("staging_bytes", [8192, 1 << 20])
@pytest.mark.parametrize(("shape", "cut"), CUTS)
def test_a_cut_reads_what_it_would_take_of_the_tensor(
    tmp_path: Path, shape: tuple[int, ...], cut: Cut, staging_bytes: int, stored: torch.dtype
) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(stored)
    save_file({"odd": torch.zeros(3, dtype=torch.uint8), "w": tensor}, tmp_path / "model.safetensors")
    entry = Checkpoint.listed([tmp_path / "model.safetensors"], "files").tensors["w"]
    assert torch.equal(read_cut(CutTensor(entry, cut), torch.float32, staging_bytes), cut.of(tensor).float())


def test_the_disk_reads_the_rows_of_columns(tmp_path: Path) -> None:
    save_file({"w": torch.randn(1024, 1024)}, tmp_path / "model.safetensors")
    entry = Checkpoint.listed([tmp_path / "model.safetensors"], "files").tensors["w"]
    place = SlabTensor("w", torch.float32, (1024, 256))
    extents = tuple(CutTensor(entry, Cut(1, ((256, 512),))).extents(place))
    assert [(extent.nbytes, extent.rows) for extent in extents] == [(1024 * 256 * 4, 1024)]
    assert 1023 * 4096 < covered_bytes(extents) <= 1025 * 4096


@pytest.mark.parametrize("cut", [Cut(1, ((1, 3), (5, 7))), Cut(2, ((4, 9),)), Cut(0, ((1, 3),))])
def test_a_cut_of_joined_tensors(tmp_path: Path, cut: Cut) -> None:
    """Experts whose gate and other product are tensors of their own in the file."""
    torch.manual_seed(0)
    names = [f"{expert}.{part}" for expert in range(3) for part in ("gate", "up")]
    tensors = {name: torch.randn(4, 10) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    found = Checkpoint.listed([tmp_path / "model.safetensors"], "files").tensors
    joined = JoinedTensor.of("gate_up", (3, 8, 10), [found[name] for name in names])
    assert joined is not None
    whole = torch.cat([tensors[name] for name in names]).view(3, 8, 10)
    assert torch.equal(read_cut(CutTensor(joined, cut), torch.float32, 8192), cut.of(whole))


def parts(cuts: Sequence[Cut], tensor: torch.Tensor) -> list[torch.Tensor]:
    return [cut.of(tensor) for cut in cuts]


def test_heads_of_fused_products() -> None:
    """Four heads of two keys, width 2, on two ranks and on four, where two ranks have one head of keys."""
    rows = torch.arange(16)
    for size, keys in ((2, (1, 1)), (4, (2, 2))):
        heads = [Heads.of(4, 2, Shard(rank, size)) for rank in range(size)]
        fused = parts([each.fused(0, 16) for each in heads], rows)
        queries = torch.cat([part[: 8 // size] for part in fused])
        assert torch.equal(queries, rows[:8])
        own = [each.kv for each in heads]
        assert [tuple(part[8 // size :].tolist()) for part in fused] == [
            (*range(8 + 2 * begin, 8 + 2 * end), *range(12 + 2 * begin, 12 + 2 * end)) for begin, end in own
        ]
        assert [own.count(each) for each in sorted(set(own))] == list(keys)
    grouped = [Heads.of(4, 2, Shard(rank, 4)).grouped(0, 16) for rank in range(4)]
    assert [part.tolist() for part in parts(grouped, rows)] == [
        [0, 1, 4, 5, 6, 7],
        [2, 3, 4, 5, 6, 7],
        [8, 9, 12, 13, 14, 15],
        [10, 11, 12, 13, 14, 15],
    ]


def test_heads_are_uneven_where_keys_allow_it() -> None:
    assert [Heads.of(7, 7, Shard(rank, 3)).query for rank in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [Heads.of(7, 7, Shard(rank, 3)).kv for rank in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [Heads.of(7, 1, Shard(rank, 3)).kv for rank in range(3)] == [(0, 1)] * 3
    assert Heads.of(7, 1, Shard(1, 3)).fused(0, 18).ranges == ((6, 10), (14, 16), (16, 18))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp_size = 4 does not divide 3 attention heads; .* are 1, 2, 3$"):
        Heads.of(3, 3, Shard(0, 4))
    with pytest.raises(ConfigError, match=r"8 attention heads and 2 of keys and values; .* are 1, 2, 4, 8$"):
        Heads.of(8, 2, Shard(0, 16))
    with pytest.raises(ConfigError, match=r"12 attention heads and 3 of keys and values; .* are 1, 3, 6, 12$"):
        Heads.of(12, 3, Shard(0, 2))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_every_element(size: int) -> None:
    """Together the ranks have each element of a cut parameter, as often as heads of keys are repeated."""
    model = tiny_model("llama", num_layers=1)
    found = [Sharding.of(model, Shard(rank, size)) for rank in range(size)]
    for name, parameter in model.named_parameters():
        cuts = [each.cuts[name] for each in found] if name in found[0].cuts else []
        repeats = size // 2 if cuts and ("k_proj" in name or "v_proj" in name) else 1
        if "norm" in name:
            assert not cuts
        else:
            assert sum(cut.length for cut in cuts) == repeats * parameter.shape[cuts[0].dim], name


def test_groups_of_quantized_columns_stay_whole() -> None:
    assert [Shard(rank, 4).bounds(96, 16) for rank in range(4)] == [(0, 32), (32, 64), (64, 80), (80, 96)]
    assert [Shard(rank, 4).padded_bounds(131) for rank in range(4)] == [(0, 33), (33, 66), (66, 99), (99, 131)]


def test_every_family_can_be_divided() -> None:
    assert [family.name for family in FAMILIES if not family.is_tensor_parallel] == []


def test_an_unknown_family_is_refused() -> None:
    model = family_model("bart", "BartModel")
    model.config.model_type = "led"
    with pytest.raises(ConfigError, match=r"how the layers of a BartModel are divided is not known; .* share the weig"):
        Sharding.of(model, Shard(0, 2))


@pytest.mark.parametrize(
    ("kind", "class_name", "switch"),
    [("bert", "BertModel", "add_cross_attention"), ("stablelm", "StableLmForCausalLM", "qk_layernorm")],
)
def test_a_switch_that_changes_layers_is_refused(kind: str, class_name: str, switch: str) -> None:
    model = family_model(kind, class_name)
    setattr(model.config, switch, True)
    with pytest.raises(ConfigError, match=f"if its config.json sets {switch}; leave the key out"):
        Sharding.of(model, Shard(0, 2))


def test_a_weight_without_a_plan_is_refused() -> None:
    model = tiny_model("llama", num_layers=1)
    model.model.layers[0].mlp.extra = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"no plan says how model.layers.0.mlp.extra.weight is divided"):
        Sharding.of(model, Shard(0, 2))


def test_an_injection_policy_must_name_what_is_summed() -> None:
    model = tiny_model("opt", num_layers=1)
    kind = type(model.model.decoder.layers[0])
    Sharding.of(model, Shard(0, 2), [BlockClass(kind, ("self_attn.out_proj", "fc2"))])
    with pytest.raises(ConfigError, match=r"injection_policy.OPTDecoderLayer must name .*leaves out .*layers.0.fc2$"):
        Sharding.of(model, Shard(0, 2), [BlockClass(kind, ("self_attn.out_proj",))])


def test_heads_whose_codes_share_scales_stay_together() -> None:
    assert [Heads.of(6, 6, Shard(rank, 2), (2, 1)).query for rank in range(2)] == [(0, 4), (4, 6)]
    assert [Heads.of(6, 1, Shard(rank, 2), (2, 1)).kv for rank in range(2)] == [(0, 1)] * 2
    assert [Heads.of(8, 4, Shard(rank, 2), (2, 2)).kv for rank in range(2)] == [(0, 2), (2, 4)]
    shared = "2 and 1 of which share scales or words of the checkpoint's codes"
    with pytest.raises(ConfigError, match=rf"tp_size = 4 does not divide 6 attention heads, {shared}; .* 1, 2, 3$"):
        Heads.of(6, 6, Shard(0, 4), (2, 1))
    with pytest.raises(ConfigError, match=rf"8 attention heads and 4 of keys and values, {shared}; .* 1, 2, 4$"):
        Heads.of(8, 4, Shard(0, 8), (2, 1))


def cut_store(folder: Path, shard: Shard) -> None:
    """Cut a checkpoint's weights for a rank."""
    store = Checkpoint.open(folder)
    model = build_meta_model(store)
    weights = match_weights(model, store, find_stored_scheme(store))
    Sharding.of(model, shard, grain=Grain.of(None, weights)).cut_weights(weights)


def test_codes_are_cut_where_groups_end_or_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path / "gptq", "gptq")
    cut_store(tmp_path / "gptq", Shard(1, 2))
    with pytest.raises(ConfigError, match=r"tp_size = 4 does not divide 4 .*, 2 and 1 of which share .* are 1, 2$"):
        cut_store(tmp_path / "gptq", Shard(0, 4))
    make_store(
        tiny_checkpoint("opt", tmp_path / "opt", num_layers=1),
        tmp_path / "store",
        bits=4,
        group_size=64,
        include=["fc2"],
    )
    cut_store(tmp_path / "store", Shard(1, 2))
    message = r"tp_size = 4: codes of 64 of the 128 rows or columns of .*fc1.weight share .* up to 2 work"
    with pytest.raises(ConfigError, match=message):
        cut_store(tmp_path / "store", Shard(0, 4))


def test_columns_in_activation_order_are_cut_by_groups_or_refused(tmp_path: Path) -> None:
    """Two groups of 32 columns, whatever the four heads before them."""
    write_quantized(tmp_path, "gptq in activation order")
    cut_store(tmp_path, Shard(1, 2))
    with pytest.raises(
        ConfigError, match=r"tp_size = 4 is more than the 2 groups of columns of .*self_attn.o_proj.wei"
    ):
        cut_store(tmp_path, Shard(0, 4))


def test_a_cut_within_words_is_refused(tmp_path: Path) -> None:
    """Heads of 20 codes, of which words hold eight, divided without knowing of them."""
    shape = {"hidden_size": 80, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=16))
    write_quantized(tmp_path, "awq", model, group_size=16)
    store = Checkpoint.open(tmp_path)
    built = build_meta_model(store)
    weights = match_weights(built, store, find_stored_scheme(store))
    with pytest.raises(ConfigError, match=r"its 80 rows share words or scales in 8s, and a rank's would end at 20"):
        Sharding.of(built, Shard(0, 4)).cut_weights(weights)


def test_undo_restores_attributes_and_config() -> None:
    for family, class_name in [case for case in CASES if case[0].model_type in ("gpt2", "falcon", "stablelm")]:
        model = family_model(family.model_type, class_name)
        before = model.config.to_dict(), [vars(module).get("num_heads") for module in model.modules()]
        own_class = type(model.config)
        sharding = Sharding.of(model, Shard(1, 2))
        sharding.apply(model)
        assert model.config.num_attention_heads == 2
        assert model.config.head_dim == 16
        sharding.undo()
        assert type(model.config) is own_class
        assert (model.config.to_dict(), [vars(module).get("num_heads") for module in model.modules()]) == before


def test_words_of_older_transformers_for_experts() -> None:
    """Those of 5.17, where a module of experts was called as if its matrices were divided."""
    config = MixtralConfig(num_local_experts=4, num_attention_heads=4, num_key_value_heads=2)
    config.base_model_ep_plan = {
        "layers.*.mlp.gate": "ep_router",
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts": "moe_tp_experts",
    }
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    plan = find_plan(model, Shard(0, 2, 2))
    assert {path: plan[path] for path in plan if path.startswith("mlp.")} == {
        "mlp.gate": "replicated",
        "mlp.experts.gate_up_proj": "grouped_gemm",
        "mlp.experts.down_proj": "grouped_gemm",
        "mlp.experts": "ep_dispatch_experts",
    }
