"""Stores: checkpoints of quantized weights that lie on disk as they stream; written here, and read."""
