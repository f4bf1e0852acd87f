"""Serves a model over HTTP: one process takes requests, and one for each replica computes."""
