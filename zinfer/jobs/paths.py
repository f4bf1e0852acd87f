"""Where the files of a job lie."""

from pathlib import Path


def manifest_path(output: Path) -> Path:
    """Where the manifest of an output lies."""
    return output.with_name(output.name + ".manifest.json")
