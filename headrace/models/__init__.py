"""Holds the model families, their registry and the loader of weights."""
