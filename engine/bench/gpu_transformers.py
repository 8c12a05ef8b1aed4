"""The same prompts by `transformers`, for the comparison of `octavo bench gpu`."""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model.pull import pull


@torch.inference_mode()
def tokens_per_second(model: str, prompts: list[str], new_tokens: int, device: str) -> float:
    """Greedy generation of `new_tokens` for all prompts as one padded batch."""
    path = pull(model)
    where = {"gguf_file": path.name} if path.is_file() else {}
    folder = str(path.parent if path.is_file() else path)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **where)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **where).to(device)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
    taken = 0.0
    for _ in range(2):  # the first sets everything up
        began = time.perf_counter()
        loaded.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
        taken = time.perf_counter() - began
    return len(prompts) * new_tokens / taken
