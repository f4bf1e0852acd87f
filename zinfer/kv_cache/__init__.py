"""The paged KV cache: pages on the device or in host memory, and the swap space of preempted sequences."""
