"""KV bookkeeping: block pool, block tables, prefix index, tiers. Pure Python: ids only, never tensors."""
