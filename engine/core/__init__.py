"""Scheduler, requests, plans and statistics. Pure Python: no torch, no numpy, no I/O."""
