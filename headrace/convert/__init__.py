"""Holds what makes a quantized checkpoint of an unquantized one (`headrace quantize`)."""
