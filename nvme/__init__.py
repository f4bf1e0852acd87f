"""Reads bytes of files: aligned buffers, direct I/O, a choice of backends. Knows no tensors."""
