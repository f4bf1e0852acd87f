"""zinfer's own store format: its manifest, and the scheme that reads its quantized matrices."""
