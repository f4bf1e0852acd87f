"""What a request asks and gets: sampling parameters, prompts as tokens, stop criteria, completions."""
