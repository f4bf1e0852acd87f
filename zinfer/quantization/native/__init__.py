"""The format that zinfer writes: a manifest, and the scheme that reads its quantized matrices."""
