"""Turns the logits of a whole batch into tokens, on the device."""
