"""Holds the weight formats: how a linear layer stores and applies its weight."""
