"""Decides what each pass computes: which sequences run, wait or make room, and which pages they hold; no tensors."""
