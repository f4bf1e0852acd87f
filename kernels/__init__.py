"""Fused operations, each a Triton kernel with its torch reference."""
