"""Triton kernels with a torch reference beside each; tensors in, tensors out."""
