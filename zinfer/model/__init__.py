"""A model without its weights: built on the meta device, partitioned into blocks, matched with its checkpoint."""
