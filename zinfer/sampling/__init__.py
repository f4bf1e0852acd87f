"""Chooses next tokens from logits, on the device that holds them."""
