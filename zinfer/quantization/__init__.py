"""Quantized weights: how they are made, how a module holds them, and how other tools store them."""
