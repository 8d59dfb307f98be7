"""Measures one batch's latency, offline throughput, or a running server. Flags and JSON keys are vLLM's."""
