"""Names of the machines that can be planned for, apart from their figures: a misspelt one is told at once."""

from typing import Final

from zinfer.errors import ConfigError

PRESET_NAMES: Final = ("a6000", "h200")


def check_preset_name(name: str) -> None:
    """Raise ConfigError if no preset is named so; it lists them."""
    if name not in PRESET_NAMES:
        raise ConfigError(f"--machine {name}: no such preset; there are {', '.join(PRESET_NAMES)} (`--machine list`)")
