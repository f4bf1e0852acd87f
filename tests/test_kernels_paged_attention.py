"""Paged attention: kernels and reference beside float64, alone and among others, with poison where nothing is read."""

from dataclasses import replace

import pytest
import torch
from attention_cases import LARGE, SMALL, AttentionCall, AttentionCase, attention_call
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_footprint import measured_peak_bytes

from zinfer.kernels.decode_attention import DecodeTiles, decode_attention
from zinfer.kernels.kv_pages import KVPages, PagedLayout
from zinfer.kernels.launching import INTERPRETED
from zinfer.kernels.padded_attention import padded_attention_bytes
from zinfer.kernels.paged_attention import paged_attention, paged_attention_kernel, paged_attention_ref
from zinfer.kernels.prompt_attention import PromptTiles, prompt_attention

DEVICE = "cpu" if INTERPRETED else "cuda"


def keys_and_values(pages: KVPages, table: list[int], first: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, [kv_heads, keys, dim], token by token."""
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    parts = ((pages.keys, pages.key_scales), (pages.values, pages.value_scales))
    for token in range(first, length):
        page, place = table[token // pages.page_size], token % pages.page_size
        for taken, (codes, scales) in zip(found, parts, strict=True):
            row = codes[page, place].double()
            taken.append(row if scales is None else row * scales[page, :, place].double()[:, None])
    return torch.stack(found[0], 1), torch.stack(found[1], 1)


def dense(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """What each query gets, [tokens, heads, value_dim] in float64, and how far a kernel may be off."""
    wanted, allowed, rule = [], [], call.rule
    place_worth = torch.finfo(call.query.dtype).eps
    starts, lengths = call.layout.query_starts.tolist(), call.layout.context_lengths.tolist()
    for row, length in enumerate(lengths):
        first_place = length - (starts[row + 1] - starts[row])
        first = 0 if rule.window is None else max(0, first_place - rule.window + 1)
        keys, values = keys_and_values(call.pages, call.layout.page_table[row].tolist(), first, length)
        shared = call.query.shape[1] // keys.shape[0]
        keys, values = (part.repeat_interleave(shared, 0) for part in (keys, values))
        for place in range(first_place, length):
            query = call.query[starts[row] + place - first_place].double()
            behind = 0 if rule.window is None else max(0, place - rule.window + 1)
            seen = slice(behind - first, place + 1 - first)
            scores = torch.einsum("hd,hkd->hk", query, keys[:, seen]) * rule.scale
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            if rule.alibi_slopes is not None:
                distance = torch.arange(place - behind, -1, -1, device=query.device)
                scores = scores - rule.alibi_slopes.double()[:, None] * distance
            everything = scores
            if rule.sinks is not None:
                everything = torch.cat((scores, rule.sinks.double()[:, None]), 1)
            weights = torch.softmax(everything, 1)[:, : scores.shape[1]]
            wanted.append(torch.einsum("hk,hkd->hd", weights, values[:, seen]))
            magnitudes = torch.einsum("hk,hkd->hd", weights, values[:, seen].abs())
            # Weights are rounded before they meet values; products lose the places that float32 does not have.
            rounding = place_worth + 2**-18 * (1 + everything.abs().amax(1, keepdim=True))
            allowed.append(magnitudes * rounding)
    exact = torch.stack(wanted)
    return exact, torch.stack(allowed) + place_worth * exact.abs() + 1e-6


def assert_right(found: torch.Tensor, call: AttentionCall) -> None:
    wanted, allowed = dense(call)
    assert found.dtype == call.query.dtype
    assert found.shape == wanted.shape
    assert torch.isfinite(found).all()
    worst = ((found.double() - wanted).abs() / allowed).max().item()
    assert worst <= 1, f"{worst} times the allowed error"


def attended(call: AttentionCall) -> torch.Tensor:
    return paged_attention_kernel(call.query, call.pages, call.layout, call.rule)


def only(call: AttentionCall, rows: list[int], num_decodes: int | None = None) -> AttentionCall:
    """The call with some of its segments, in another order."""
    layout = call.layout
    starts = layout.query_starts.tolist()
    query = torch.cat([call.query[starts[row] : starts[row + 1]] for row in rows])
    sizes = torch.tensor([starts[row + 1] - starts[row] for row in rows], dtype=torch.int32)
    chosen = torch.tensor(rows, device=query.device)
    lengths = layout.context_lengths[chosen]
    begins = torch.cat((torch.zeros(1, dtype=torch.int32), sizes.cumsum(0).int())).to(query.device)
    part = PagedLayout(begins, lengths, layout.page_table[chosen], int(sizes.max()), int(lengths.max()), num_decodes)
    return AttentionCall(query, call.pages, part, call.rule)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_each_kind_of_layer(kernel_device: str, case: AttentionCase) -> None:
    torch.manual_seed(0)
    call = attention_call(case, kernel_device)
    assert_right(attended(call), call)
    assert_right(paged_attention_ref(call.query, call.pages, call.layout, call.rule), call)


@pytest.mark.usefixtures("poisoned_empty")
def test_segments_without_tokens_change_nothing(kernel_device: str) -> None:
    """Passes with prompts are padded with them, of any length of context."""
    call = attention_call(SMALL[0], kernel_device)
    layout = call.layout
    padded = replace(
        layout,
        query_starts=torch.cat([layout.query_starts, layout.query_starts[-1:].expand(3)]),
        context_lengths=torch.cat([layout.context_lengths, layout.context_lengths[-1:].expand(3)]),
        page_table=torch.cat([layout.page_table, layout.page_table[-1:].expand(3, -1)]),
        most_queries=4 * layout.most_queries,
        most_context=4096,
        num_decodes=None,
    )
    wanted = attended(replace(call, layout=replace(layout, num_decodes=None)))
    assert_right(wanted, call)
    assert torch.equal(attended(replace(call, layout=padded)), wanted)
    for attend in (paged_attention_ref, paged_attention):
        assert torch.equal(
            attend(call.query, call.pages, padded, call.rule), attend(call.query, call.pages, layout, call.rule)
        )


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    kv_heads, shared = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 5, 8, 17]))
    segments = draw(
        st.lists(
            st.integers(1, 150).flatmap(
                lambda length: st.tuples(st.one_of(st.just(1), st.integers(1, min(length, 30))), st.just(length))
            ),
            min_size=1,
            max_size=4,
        )
    )
    dims = draw(st.sampled_from([(8, 8), (64, 64), (80, 80), (112, 96), (128, 128), (192, 128), (256, 256)]))
    return AttentionCase(
        tuple(segments),
        kv_heads * shared,
        kv_heads,
        *dims,
        page_size=draw(st.sampled_from([1, 16, 32, 64, 128])),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        pages_dtype=draw(st.sampled_from([None, None, torch.int8, torch.float8_e4m3fn])),
        window=draw(st.one_of(st.none(), st.integers(1, 160))),
        softcap=draw(st.sampled_from([None, None, 5.0, 50.0])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )


@given(case=cases(), seed=st.integers(0, 1 << 20))
@hypothesis_settings(hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.too_slow])
def test_any_layer(case: AttentionCase, seed: int) -> None:
    torch.manual_seed(seed)
    call = attention_call(case, DEVICE)
    assert_right(attended(call), call)
    assert_right(paged_attention_ref(call.query, call.pages, call.layout, call.rule), call)


MIXED = AttentionCase(((1, 100), (1, 7), (1, 301), (19, 160), (2, 2)), 6, 2, 64, 64, 16, sinks=True)
"""Decodes first. With `SHORT_SPLITS` they are split in two, one and five parts."""

SHORT_SPLITS = DecodeTiles(16, 64, 4, 2)


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("window", [None, 70], ids=["all", "window"])
@pytest.mark.parametrize("pages_dtype", [None, torch.int8], ids=str)
def test_a_segment_does_not_see_the_others(
    kernel_device: str, window: int | None, pages_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zinfer.kernels.decode_attention.decode_tiles_for", lambda *_: SHORT_SPLITS)
    torch.manual_seed(0)
    call = attention_call(replace(MIXED, window=window, pages_dtype=pages_dtype), kernel_device)
    together = attended(call)
    assert_right(together, call)
    assert torch.equal(together, attended(call))
    assert torch.equal(together, attended(only(call, [0, 1, 2, 3, 4], num_decodes=3)))
    starts = call.layout.query_starts.tolist()
    for row in range(5):
        alone = attended(only(call, [row]))
        assert torch.equal(together[starts[row] : starts[row + 1]], alone)
        hinted = attended(only(call, [row], num_decodes=int(row < 3)))
        assert torch.equal(alone, hinted)


@pytest.mark.slow
def test_turns_of_segments_change_nothing(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.kernels.decode_attention.decode_tiles_for", lambda *_: SHORT_SPLITS)
    torch.manual_seed(0)
    call = attention_call(MIXED, kernel_device)
    at_once = attended(call)
    for workspace_bytes in (1, 20_000):
        monkeypatch.setattr("zinfer.kernels.decode_attention._WORKSPACE_BYTES", workspace_bytes)
        assert torch.equal(attended(call), at_once)


def test_splits_grow_with_a_long_segment(kernel_device: str) -> None:
    torch.manual_seed(0)
    call = attention_call(AttentionCase(((1, 1000), (1, 300)), 2, 1, 16, 16, 32), kernel_device)
    out = torch.full((2, 2, 16), float("nan"), dtype=torch.float16, device=kernel_device)
    decode_attention(call.query, call.pages, call.layout, call.rule, out, DecodeTiles(16, 32, 4, 2))
    assert_right(out, call)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [None, 21], ids=["all", "window"])
def test_chunks_of_a_prompt_get_what_the_whole_prompt_gets(kernel_device: str, window: int | None) -> None:
    torch.manual_seed(0)
    call = attention_call(AttentionCase(((90, 90),), 6, 2, 64, 64, 16, window=window), kernel_device)
    tiles = PromptTiles(32, 16, 4, 2)
    out = torch.full(call.query.shape, float("nan"), dtype=torch.float16, device=kernel_device)
    prompt_attention(call.query, call.pages, call.layout, call.rule, out, tiles)
    assert_right(out, call)
    for cut in (2, 33, 64):
        part = replace(
            call.layout,
            query_starts=torch.tensor([0, 90 - cut], dtype=torch.int32, device=kernel_device),
            most_queries=90 - cut,
        )
        chunk = torch.empty_like(out[cut:])
        prompt_attention(call.query[cut:], call.pages, part, call.rule, chunk, tiles)
        if kernel_device == "cuda":
            assert torch.equal(chunk, out[cut:])
        else:  # the interpreter's products are numpy's, whose sums depend on the processor
            torch.testing.assert_close(chunk, out[cut:], rtol=2e-3, atol=1e-3)


def test_small_values_beside_large_ones_keep_their_places(kernel_device: str) -> None:
    """Codes of float16: a value's scale far below 1 must not push weights out of float16's range."""
    torch.manual_seed(0)
    call = attention_call(AttentionCase(((1, 200), (4, 150)), 4, 2, 64, 64, 64, pages_dtype=torch.int8), kernel_device)
    assert call.pages.value_scales is not None
    small = replace(call.pages, value_scales=call.pages.value_scales * 2.0**-20)
    found = attended(replace(call, pages=small)).float()
    usual = attended(call).float()
    # Sums are of the order of one, and times 2**-20 float16 has steps of 2**-24 left.
    assert (found - usual * 2.0**-20).abs().max() <= 2.0**-24


def test_strides_of_queries_and_pages(kernel_device: str) -> None:
    """Values that are the first columns of keys, as compressed attention has them; queries with strange strides."""
    torch.manual_seed(0)
    call = attention_call(AttentionCase(((1, 30), (9, 33)), 4, 1, 96, 96, 16), kernel_device)
    shared = replace(call, pages=KVPages(call.pages.keys, call.pages.keys[..., :64]))
    found = attended(shared)
    assert_right(found, shared)
    turned = call.query.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert turned.stride(2) != 1
    assert torch.equal(attended(replace(shared, query=turned)), found)


LONG = AttentionCase(
    ((1, 2600), (140, 1300)), 16, 8, 128, 128, dtype=torch.float32, softcap=30.0, alibi=True, sinks=True
)
"""Each block's keys exceed a step."""

OF_CPUS = (
    *SMALL,
    LONG,
    replace(LONG, window=1100, softcap=None),
    AttentionCase(((3, 300), (90, 90)), 128, 1, 576, 512, dtype=torch.bfloat16, values_in_keys=True),
    AttentionCase(
        tuple((1 + row % 9, 9 + row * 7 % 190) for row in range(90)), 4, 2, 16, 16, 16, torch.float32, window=60
    ),
)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", OF_CPUS, ids=lambda case: str(replace(case, segments=case.segments[:3])))
def test_the_cpu_pads_groups_to_what_the_reference_gives(case: AttentionCase) -> None:
    """Speculative queries, chunks of prompts, whole prompts and decodes, in one pass."""
    torch.manual_seed(0)
    assert_like_the_reference(attention_call(case, "cpu"))


@st.composite
def passes(draw: st.DrawFn) -> AttentionCase:
    """Many sequences: decodes, guesses that are verified, and chunks of prompts, behind shared prefixes or none."""
    lengths = st.integers(1, draw(st.sampled_from([20, 300])))
    queries = st.one_of(st.just(1), st.integers(1, 5), st.integers(1, 300))
    pairs = st.tuples(queries, lengths).map(lambda pair: (min(pair), pair[1]))
    return replace(draw(cases()), segments=tuple(draw(st.lists(pairs, min_size=1, max_size=30))))


@given(case=passes(), seed=st.integers(0, 1 << 20))
@hypothesis_settings(hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.too_slow])
def test_the_cpu_pads_groups_of_any_pass(case: AttentionCase, seed: int) -> None:
    torch.manual_seed(seed)
    assert_like_the_reference(attention_call(case, "cpu"))


def assert_like_the_reference(call: AttentionCall) -> None:
    found = paged_attention(call.query, call.pages, call.layout, call.rule)
    assert found.dtype == call.query.dtype
    wanted = paged_attention_ref(call.query.float(), call.pages, call.layout, call.rule)
    allowed = torch.finfo(call.query.dtype).eps * wanted.abs() + 2**-14
    worst = ((found.float() - wanted).abs() / allowed).max().item()
    assert worst <= 1, f"{worst} times the allowed difference"


def test_a_broken_sequence_breaks_no_other_of_its_group() -> None:
    torch.manual_seed(0)
    case = AttentionCase(((1, 30), (1, 50), (1, 44), (7, 30), (5, 41)), 4, 2, 16, 16, 16)
    call = attention_call(case, "cpu")
    for broken in range(len(case.segments)):
        keys = call.pages.keys.clone()
        keys[call.layout.page_table[broken, 0].long()] = float("nan")
        pages = replace(call.pages, keys=keys)
        found = paged_attention(call.query, pages, call.layout, call.rule)
        sizes = call.layout.query_starts.diff().long()
        of_broken = torch.arange(len(sizes)).repeat_interleave(sizes) == broken
        assert torch.equal(found.isnan().flatten(1).any(1), of_broken)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(tuple((1 + row % 7, 200 + 9 * row) for row in range(40)), 8, 8, 128, 128, 64),
        AttentionCase(tuple((9, 9 + row) for row in range(300)), 4, 4, 32, 32, 16, torch.float32),
        AttentionCase(((900, 2000), (1, 9000)), 8, 2, 128, 128, 64, pages_dtype=torch.int8, alibi=True, window=4000),
        AttentionCase(((200, 600),), 32, 1, 576, 512, 64, torch.bfloat16, values_in_keys=True),
    ],
    ids=["verified", "prompts", "sliding", "latent"],
)
def test_the_workspace_of_a_cpu_is_bounded(case: AttentionCase) -> None:
    call = attention_call(case, "cpu")
    peak_bytes = measured_peak_bytes(lambda: paged_attention(call.query, call.pages, call.layout, call.rule))
    result_bytes = case.heads * case.value_dim * call.query.shape[0] * case.dtype.itemsize
    bound_bytes = padded_attention_bytes(case.heads, case.kv_heads, case.head_dim, case.value_dim)
    assert result_bytes < peak_bytes <= result_bytes + bound_bytes <= 8 * 2**20 + 3 * 2**23


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_cases(case: AttentionCase) -> None:
    torch.manual_seed(0)
    call = attention_call(case, "cuda")
    found = attended(call)
    assert all(torch.equal(found, attended(call)) for _ in range(3))
    wanted = paged_attention_ref(call.query.float(), call.pages, call.layout, call.rule)
    allowed = 4 * torch.finfo(case.dtype).eps * (1 + wanted.abs()) + 1e-5
    worst = ((found.float() - wanted).abs() / allowed).max().item()
    assert worst <= 1, f"{worst} times the allowed error"
    starts = call.layout.query_starts.tolist()
    for row in range(len(case.segments)):
        assert torch.equal(found[starts[row] : starts[row + 1]], attended(only(call, [row])))
