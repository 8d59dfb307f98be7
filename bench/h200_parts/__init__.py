"""Holds the parts of `bench/h200.py`: what is measured and checked, the bounds, and the tables that show it."""
