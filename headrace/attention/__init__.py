"""Holds the attention backends over the paged KV cache."""
