"""`zinfer families`: the tested models, and the features that each supports."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from zinfer.cli.ending import exit_on_error, importing

if TYPE_CHECKING:
    from rich.table import Table

_FORMATS = (
    "weights: fp32, fp16, bf16; FP8 as published, GPTQ, AWQ, and compressed-tensors in INT4, INT8 or FP8; GGUF. All "
    "families can be divided among GPUs; --markdown lists more"
)
_COLUMNS = (
    "family",
    "models",
    "classes",
    "streams",
    "continuous batching",
    "fused kernels",
    "tensor parallel",
    "expert parallel",
)


def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, as in docs/families.md.")] = False,
) -> None:
    """List the tested model families, and the features that each supports."""
    with importing():
        import zinfer.model.families  # noqa: F401

    with exit_on_error():
        if markdown:
            print(families_markdown(), end="")
        else:
            Console().print(families_table())


def families_table() -> "Table":
    """Return a table with a row per family and a line per class; it fits 80 columns."""
    from rich.table import Table

    from zinfer.model.families import FAMILIES

    table = Table(
        title="families of models that are tested; all stream", title_justify="left", caption=_FORMATS, show_lines=True
    )
    table.add_column("family: models")
    table.add_column("classes", no_wrap=True)
    table.add_column("continuous\nbatching")
    for family in FAMILIES:
        models = "" if family.models == family.name else f": {family.models}"
        table.add_row(family.name + models, "\n".join(family.classes), "yes" if family.is_batched else "")
    return table


def families_markdown() -> str:
    """Return the tables in Markdown, as in docs/families.md."""
    from zinfer.model.families import FAMILIES, TOGETHER, walked_types, walked_version

    rows = [_COLUMNS, ("---",) * len(_COLUMNS)]
    for family in FAMILIES:
        can = (family.is_batched, family.is_tensor_parallel, family.is_expert_parallel)
        batched, *parallel = ("yes" if each else "" for each in can)
        classes, fused = ", ".join(family.classes), "; ".join(family.fused)
        rows.append((family.name, family.models, classes, "yes", batched, fused, *parallel))
    walked = walked_types()
    num_together = sum(how.startswith(TOGETHER) for _, how in walked.values())
    begin = (
        f"\n## All causal language models\n\nOf the {len(walked)} model types of transformers {walked_version()} with "
        f"a causal language model, `LLM` takes {num_together}, with their usual options.\n\n"
    )
    types = [("model type", "class", "sequences run"), ("---",) * 3]
    types += [(model_type, name, how) for model_type, (name, how) in walked.items()]
    return _markdown(rows) + begin + _markdown(types)


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
