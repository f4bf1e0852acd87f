"""Requests and their results: sampling parameters, prompts as tokens, stop criteria, completions."""
