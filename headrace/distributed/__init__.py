"""Joins ranks into groups that run collectives."""
