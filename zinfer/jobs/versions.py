"""The software that a job runs on."""

import platform
from importlib.metadata import version
from importlib.util import find_spec

from zinfer import __version__


def software() -> dict[str, str]:
    """Return the versions of what can change a row's bytes."""
    return {
        "python": platform.python_version(),
        "zinfer": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
        **{name: version(name) for name in ("llguidance",) if find_spec(name) is not None},
    }
