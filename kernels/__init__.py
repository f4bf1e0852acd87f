"""Fused operations, each a Triton kernel beside its torch reference. The first ones come with quantized weights."""
