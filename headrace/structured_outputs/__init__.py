"""Holds output to a grammar: what a client asks for, its grammar, and the tokens it allows. Needs no torch."""
