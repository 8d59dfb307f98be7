"""Holds the Triton kernels with a torch reference beside each; functions take tensors and return tensors."""
