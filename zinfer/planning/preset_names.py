"""Names of the preset machines, separate from their figures, so that a misspelt one is refused at once."""

from typing import Final

from zinfer.errors import ConfigError

PRESET_NAMES: Final = ("a6000", "h200")


def check_preset_name(name: str) -> None:
    """Raise ConfigError with all names if there is no such preset."""
    if name not in PRESET_NAMES:
        raise ConfigError(f"--machine {name}: no such preset; there are {', '.join(PRESET_NAMES)} (`--machine list`)")
