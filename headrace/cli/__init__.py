"""Holds the `headrace` command, one file a subcommand."""
