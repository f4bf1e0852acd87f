"""A model without its weights: built on the meta device, cut into blocks, matched with its checkpoint."""
