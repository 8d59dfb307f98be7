"""Weight formats: how a linear layer holds and applies its weight."""
