"""No benchmark reports a share above its ceiling."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import result


@pytest.mark.parametrize(
    "name", ["share", "link_share", "disk_share", "load_share", "sustained_share_of_best", "of_disk"]
)
def test_a_share_above_its_ceiling_is_refused(name: str, tmp_path: Path) -> None:
    result.check_shares({"cases": {"disk": {name: 1.05, "decode_s": 40.0}}})
    with pytest.raises(AssertionError, match=f"cases: disk: {name} is 4.197, above its ceiling"):
        result.keep({"cases": {"disk": {name: 4.197}}}, tmp_path / "figures.json")
    assert not list(tmp_path.iterdir())
