"""Talks with a model in a terminal: a client of a server, which it starts itself for a model's folder."""
