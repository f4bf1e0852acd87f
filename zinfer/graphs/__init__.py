"""CUDA graphs of whole forwards, which replay all launches at once (`enable_cuda_graph`).

A forward is captured once input of its form has arrived several times. Graphs read fixed addresses: input is
copied to static buffers, and the KV cache is transformers' static one, kept from call to call. Weights that stream may
be in any of several slots: a forward is split around their blocks, which are captured once for each slot.
"""
