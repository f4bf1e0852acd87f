"""Several processes that share one model: the group, the order of blocks, and the exchange of slabs' ranges."""
