"""Measures how well a model answers: tasks, their scoring, samples on disk, and comparisons with error bars."""
