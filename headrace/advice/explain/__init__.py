"""Answers a command line of vLLM: what each flag does, whether it helps, what is wrong with it, and a better line."""
