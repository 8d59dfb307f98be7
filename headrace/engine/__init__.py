"""Text to tokens and back, and the loop around scheduler and executor."""
