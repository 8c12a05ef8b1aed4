"""Guesses of what a sequence goes on with, and when they are worth their time. Knows tokens, no tensors."""
