"""Resolves configurations for the tests of quantization keys."""

from typing import Any

import pytest

from zinfer.config import resolve_settings
from zinfer.config.quantization_rules import Quantization
from zinfer.errors import ConfigError


def resolved(config: dict[str, Any]) -> Quantization | None:
    return resolve_settings(config).quantization


def refusal(config: dict[str, Any]) -> str:
    """The message of the error that it is."""
    with pytest.raises(ConfigError) as refused:
        resolve_settings(config)
    return str(refused.value)
