"""Derives settings from hardware, model and workload, with reasons."""
