"""What runs plans: the executors, the KV storage and the batch arrays. Knows plans and tensors, never requests."""
