"""Guesses the tokens that follow those of a request, which the model then verifies together."""
