"""Converts text to tokens and back, and runs the loop around scheduler and executor."""
