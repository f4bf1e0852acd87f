"""The software that a job runs on."""

import platform
from importlib.metadata import version

from zinfer import __version__


def software() -> dict[str, str]:
    """Return the versions of what can change a row's bytes."""
    return {
        "python": platform.python_version(),
        "zinfer": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }
