"""Continuous batching over streamed weights: a pass carries a token of each running sequence and chunks of prompts."""
