"""Starts the ranks and hands them steps."""
