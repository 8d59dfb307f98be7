"""Every flag and environment variable that users of vLLM type, and what becomes of each here: facts, no opinions."""
