"""Measures the machine: the link, host memory, the disk and the device's own speed; warns of what holds them back."""
