"""Model descriptions, checkpoints and weights. Knows no requests."""
