"""Decides how many of whose tokens run in each step, in integers alone."""
