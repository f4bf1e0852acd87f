"""zinfer's own keys, the section `zinfer`; part of the table in `zinfer.config.keys`."""

from __future__ import annotations

from typing import Final

from zinfer.config import values
from zinfer.config.key import Key, section, supported

OWN_KEYS: Final[tuple[Key, ...]] = (
    section("zinfer", "zinfer's own keys; as keyword arguments they may also stand alone"),
    *(
        supported(f"zinfer.max_{kind}_memory", values.size_bytes, reason, field=f"memory.max_{kind}_memory")
        for kind, reason in (
            ("device", 'most device memory, in bytes or as "24GB"'),
            ("host", "most host memory, pinned included"),
            ("pinned", "most page-locked host memory"),
        )
    ),
    *(
        supported(f"zinfer.{name}", values.count(1), f"{reason}; the plan leaves room for it", field=f"batch.{name}")
        for name, reason in (
            ("batch_size", "prompts computed together"),
            ("prompt_len", "tokens of the longest prompt"),
            ("new_tokens", "tokens generated after each"),
        )
    ),
    supported(
        "zinfer.tokens_per_pass",
        values.count(1),
        "most tokens of a ragged batch of zinfer.LLM",
        field="batching.tokens_per_pass",
    ),
    supported(
        "zinfer.max_sequences",
        values.count(1),
        "most sequences that run at once in zinfer.LLM",
        field="batching.max_sequences",
    ),
    supported(
        "zinfer.kv_cache_memory",
        values.size_bytes,
        "memory for the KV cache of zinfer.LLM, of the kind that kv_cache_tier names",
        field="batching.kv_cache_memory",
    ),
    supported(
        "zinfer.kv_cache_tier",
        values.choice("device", "host"),
        "where the KV cache is; host: a layer's pages are copied to the device while it computes",
        field="batching.kv_cache_tier",
        default="device",
    ),
    supported(
        "zinfer.kv_cache_dtype",
        values.choice("auto", "int8", "fp8"),
        "dtype of the KV cache; auto: the model's dtype",
        field="batching.kv_cache_dtype",
        default="auto",
    ),
    supported(
        "zinfer.admission_order",
        values.choice("arrival", "longest_first"),
        "which waiting sequence runs next in zinfer.LLM",
        field="batching.admission_order",
        default="arrival",
    ),
    supported(
        "zinfer.kv_page_size", values.count(1), "tokens of a page of the KV cache", field="batching.kv_page_size"
    ),
    supported("zinfer.num_slots", values.count(1), "device slots that blocks stream through", field="num_slots"),
    supported(
        "zinfer.synchronous",
        values.flag,
        "every copy is waited for: slow, for comparison",
        field="synchronous",
        default=False,
    ),
    supported(
        "zinfer.check_finite",
        values.flag,
        "generate and forward fail at infinities or NaN, before, in or after the layers, and name the first place",
        field="check_finite",
        default=False,
    ),
    supported("zinfer.trace", values.path, "file for a Perfetto trace of reads, copies and computes", field="trace"),
    supported(
        "zinfer.device",
        values.choice("auto", "cuda", "cpu"),
        "where the model computes",
        field="device",
        default="auto",
    ),
)
