"""Fingerprints models and tokenizers in milliseconds: weights are sampled, not read completely."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

_SAMPLE_BYTES = 16 * 1024
_NUM_SAMPLES = 16
_TEXT_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
)


def weights_sample(files: Sequence[Path]) -> str:
    """Return a SHA-256 over 16 evenly spread samples of 16 KiB from each file.

    This tells fine-tunes of one model apart: their headers and sizes are equal, but nearly all weights differ.
    """
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            for number in range(_NUM_SAMPLES):
                stream.seek(max(0, size_bytes - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def text_files(folder: Path) -> list[Path]:
    """Return the files that decide how text is tokenized and decoded: vocabulary, templates, end tokens."""
    return sorted({file for pattern in _TEXT_FILES for file in folder.glob(pattern) if file.is_file()})


def tokenizer_hash(folder: Path) -> str:
    """Return a SHA-256 over the names and bytes of `text_files`."""
    digest = hashlib.sha256()
    for file in text_files(folder):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
