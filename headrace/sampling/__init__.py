"""Logits -> tokens, on the device, for the whole batch at once."""
