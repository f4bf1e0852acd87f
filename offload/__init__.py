"""Slabs, tiers, slots and streams: keeps the blocks of a model moving to the device. Knows nothing of transformers."""
