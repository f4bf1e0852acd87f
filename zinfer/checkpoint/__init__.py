"""A checkpoint on disk: its folder, and the places of its tensors in files; no weights are read here."""

from zinfer.checkpoint.checkpoint import Checkpoint
from zinfer.checkpoint.folder import resolve_folder
from zinfer.checkpoint.header import Header, JoinedTensor, TensorEntry, read_header

__all__ = ["Checkpoint", "Header", "JoinedTensor", "TensorEntry", "read_header", "resolve_folder"]
