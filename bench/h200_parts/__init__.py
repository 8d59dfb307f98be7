"""The parts of `bench/h200.py`: what is measured, how, the bounds it is held against, and the tables that show it."""
