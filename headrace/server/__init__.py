"""Serves the OpenAI HTTP API."""
