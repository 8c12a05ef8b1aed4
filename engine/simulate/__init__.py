"""The real scheduler and KV memory under a virtual clock and a cost model: capacity planning without hardware."""
