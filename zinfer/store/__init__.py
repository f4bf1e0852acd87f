"""Stores: checkpoints of quantized weights, on disk in the form that streams."""
