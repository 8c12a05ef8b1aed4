"""Token constraints and sampling references. Knows no requests."""
