"""What a run will take and how long, decided before it begins: budgets, homes, buffers, seconds. Touches no device."""
