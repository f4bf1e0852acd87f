"""Measure the accuracy loss of quantization: errors of the matrices, and of the model's output."""
