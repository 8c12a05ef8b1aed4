"""Greedy decoding with the reference decoder."""

from __future__ import annotations

import torch

from engine.model.decoder import Decoder, DenseCausalAttention


@torch.inference_mode()
def greedy(decoder: Decoder, prompt: list[int], n_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Most likely continuation: (token ids, logits [n_tokens, vocab] that chose them)."""
    attend = DenseCausalAttention(decoder.spec)
    tokens, position, found, rows = prompt, 0, [], []
    for _ in range(n_tokens):
        at = torch.arange(position, position + len(tokens), device=decoder.device)
        hidden = decoder.forward(torch.tensor(tokens, device=decoder.device), at, attend)
        logits = decoder.logits(hidden[-1:])[0]
        position += len(tokens)
        tokens = [int(logits.argmax())]
        found += tokens
        rows.append(logits)
    return found, torch.stack(rows)
