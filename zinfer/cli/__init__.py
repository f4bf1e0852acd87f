"""The `zinfer` command: one file a subcommand."""

from zinfer.cli.app import app, main

__all__ = ["app", "main"]
