"""Fixtures that the whole suite shares."""

import pytest
import torch
from hypothesis import settings

# A loaded machine is slow at times; that is no fault of the property.
settings.register_profile("zinfer", deadline=None)
settings.load_profile("zinfer")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that this machine may have; tests with it are marked `gpu` for cuda."""
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device the `gpu` tests are skipped, each saying so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
