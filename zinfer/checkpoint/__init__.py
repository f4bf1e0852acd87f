"""A checkpoint on disk: its folder, its tensors and their bytes in the files; no weight is read here."""

from zinfer.checkpoint.checkpoint import Checkpoint
from zinfer.checkpoint.folder import resolve_folder
from zinfer.checkpoint.header import Header, JoinedTensor, TensorEntry, read_header

__all__ = ["Checkpoint", "Header", "JoinedTensor", "TensorEntry", "read_header", "resolve_folder"]
