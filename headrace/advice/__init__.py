"""Gives advice on machines, settings and command lines of vLLM.

It may import all of the engine, and nothing of the engine imports it: only the command line and `LLM` do.
"""
