"""Octavo's engine: continuous batching over a paged KV pool. Start reading at `engine.api` and `engine.core.engine`."""
