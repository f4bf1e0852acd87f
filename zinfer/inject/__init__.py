"""Fused kernels in the place of what transformers' modules write out: norms, rotations, activations, the middle of
gated MLPs; and one product in the place of several that multiply the same numbers. Where forwards are replayed as
graphs, products of a token or two and torch's layer norms as well.

Nothing is known of families here. A module is recognised by what it computes: its own forward is run on a few numbers,
with stand-ins for its weights, and compared with what the kernel's reference makes of them. So a family that is new, or
code that differs in a detail, is either right or left as it is. Modules and parameters stay where they are; only the
``forward`` of single instances is patched, until the patches are undone.
"""
