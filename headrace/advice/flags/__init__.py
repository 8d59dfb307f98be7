"""Knows every flag and environment variable that users of vLLM type, and what becomes of each here."""
