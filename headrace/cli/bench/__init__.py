"""Measuring: one batch's latency, offline throughput, and a running server. Flags and JSON keys are vLLM's."""
