"""How keys and values are rounded into each KV dtype, and what attention reads back.

int8 has one float32 scale per token and head, fp8 one per tensor; wider types are stored as they are.
"""

from __future__ import annotations

import torch

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def token_head_scales(x: torch.Tensor) -> torch.Tensor:
    """Scales of int8 storage: the largest magnitude of each token and head over 127. [..., head] -> [...]."""
    return x.float().abs().amax(dim=-1) / 127.0


def encode(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Values as they are stored: x / scale, rounded to nearest even and saturated at the end of the range.

    x [..., head]; scale is a number or one value per leading index. fp8 has no room for what its range does not
    hold, so values beyond it saturate instead of turning into NaN.
    """
    if dtype.is_floating_point and dtype.itemsize > 1:
        return x.to(dtype)
    factor = scale.unsqueeze(-1) if isinstance(scale, torch.Tensor) and scale.dim() else scale
    scaled = x.float() / factor
    if dtype == torch.int8:
        return torch.nan_to_num(scaled, nan=0.0).round().clamp(-127, 127).to(torch.int8)
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit).to(dtype)


def decode(stored: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """The float32 values that attention reads: stored * scale."""
    values = stored.float()
    if stored.dtype.itemsize > 1:
        return values
    return values * (scale.unsqueeze(-1) if isinstance(scale, torch.Tensor) and scale.dim() else scale)


def byte_view(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size: fp8 tensors can be viewed but not indexed on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
