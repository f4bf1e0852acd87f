"""Quantized weights: what is asked for, how a module holds them, and how they are made."""

from zinfer.quantization.rules import Quantization, QuantizationConfig, QuantRule

__all__ = ["QuantRule", "Quantization", "QuantizationConfig"]
