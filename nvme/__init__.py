"""Bytes, files and offsets: aligned buffers and direct reads by a small pool of threads. Knows nothing of tensors."""
