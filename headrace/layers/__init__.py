"""Holds the layers that models are made of, and what of them each rank of a tensor-parallel group has."""
