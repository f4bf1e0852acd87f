"""Every causal language model of transformers: an `LLM` gives sequences the tokens of each alone, or says why not."""

from collections import Counter

import pytest
import transformers
from walked_models import MODEL_TYPES, describe

from zinfer.model.families import TOGETHER, walked_types, walked_version


@pytest.mark.sampled(24)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_type_runs_as_the_table_says(model_type: str) -> None:
    assert describe(model_type) == walked_types()[model_type], "write the table again: python tests/walked_models.py"


def test_the_table_has_all_types_and_most_run_together() -> None:
    assert walked_version() == transformers.__version__
    assert tuple(walked_types()) == MODEL_TYPES
    ways = Counter(how.partition(":")[0].partition(",")[0] for _, how in walked_types().values())
    assert set(ways) == {TOGETHER, "padded", "refused"}
    assert ways[TOGETHER] >= 110
