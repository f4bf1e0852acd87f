"""Bytes, files and offsets: aligned buffers, direct reads, a choice of backends, a disk's rates. Knows no tensors."""
