"""Runs a model whose weights stream: the engine, its hooks, and what it changes in a module while it runs."""
