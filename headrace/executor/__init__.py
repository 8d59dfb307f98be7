"""Starts ranks and hands them steps."""
