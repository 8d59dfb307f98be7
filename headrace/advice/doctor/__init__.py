"""Checks a machine for what hurts an inference engine on it."""
