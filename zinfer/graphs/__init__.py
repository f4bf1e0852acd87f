"""CUDA graphs of whole forwards: what Python launches once is replayed at once (`enable_cuda_graph`).

A forward is recorded when input of the same form comes for the second time. What it reads must lie where it lay: input
is copied to places that stay, and keys and values are transformers' static ones, kept from call to call. Weights that
stream come to one of several slots: so a forward is cut around their blocks, and those are recorded for each slot.
"""
