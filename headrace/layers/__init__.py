"""The layers that models are made of; tensor parallelism lives in these names."""
