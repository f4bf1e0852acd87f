"""What quantizing a model has cost: errors of its matrices, and of what it says."""
