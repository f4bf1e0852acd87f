"""Replaces parts of transformers' modules by fused kernels: norms, rotations, activations, the middle of gated MLPs;
one product for several layers with the same input; under CUDA graphs, also products of few tokens and layer norms.

Modules are recognised by what they compute, whatever their family: a module's forward is run on a few numbers, with
stand-ins for its weights, and compared with the kernel's reference. Only the ``forward`` of instances is patched.
"""
