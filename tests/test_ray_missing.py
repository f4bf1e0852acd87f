"""`zinfer.ray` without Ray."""

import sys

import pytest

import zinfer


@pytest.mark.parametrize("name", ["LLMPredictor", "RankActors"])
def test_the_extra_is_named_where_ray_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ray", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("zinfer.jobs.ray_data", "zinfer.ranks.ray_actors"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=r"zinfer.ray needs (ray|pyarrow); .*: pip install '\.\[ray\]'"):
        getattr(zinfer.ray, name)
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = zinfer.ray.absent
