"""Quantized weights: making them, holding them in modules, and reading those of other tools."""
