"""Tensor parallelism: each of several ranks holds a shard of every layer, and computes with it."""
