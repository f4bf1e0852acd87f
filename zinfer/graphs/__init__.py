"""CUDA graphs of whole forwards: what Python launches once is replayed at once (`enable_cuda_graph`).

A forward is captured when input of the same form arrives for the second time. Graphs read fixed addresses: input is
copied to places that stay, and keys and values are transformers' static ones, kept from call to call. Weights that
stream arrive in one of several slots: so a forward is split around their blocks, and those are captured for each slot.
"""
