"""A decoder of random weights in the shape of an 8B Llama, for end-to-end figures without a download."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.model.decoder import Decoder
from engine.model.fused import FusedDecoder
from engine.model.spec import DecoderSpec, LayerSpec, RopeSpec

LLAMA_8B = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head": 128, "inter": 14336, "vocab": 128256}
TINY = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head": 64, "inter": 256, "vocab": 512}


def spec_of(sizes: dict[str, int], max_position: int) -> DecoderSpec:
    """The spec of a Llama of these sizes."""
    head = sizes["head"]
    rope = RopeSpec(tuple(500000.0 ** (-2 * i / head) for i in range(head // 2)))
    return DecoderSpec(
        family="llama", vocab_size=sizes["vocab"], hidden_size=sizes["hidden"], num_layers=sizes["layers"],
        num_heads=sizes["heads"], num_kv_heads=sizes["kv_heads"], head_size=head, intermediate_size=sizes["inter"],
        max_position=max_position, rotary_dim=head, rope=(rope,), attn_scale=head**-0.5,
        layers=(LayerSpec(),) * sizes["layers"],
    )  # fmt: skip


def shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight; see `engine.model.spec.WEIGHT_ROLES`."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    yield from (("embed", (spec.vocab_size, hidden)), ("lm_head", (spec.vocab_size, hidden)), ("final_norm", (hidden,)))
    for layer in range(spec.num_layers):
        at = f"layers.{layer}."
        yield from ((at + "attn_norm", (hidden,)), (at + "mlp_norm", (hidden,)))
        yield from (
            (at + "q", (q, hidden)),
            (at + "k", (kv, hidden)),
            (at + "v", (kv, hidden)),
            (at + "o", (hidden, q)),
        )
        yield from ((at + "gate", (inter, hidden)), (at + "up", (inter, hidden)), (at + "down", (hidden, inter)))


def random_decoder(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, kind: type[Decoder] = FusedDecoder
) -> Decoder:
    """Weights drawn on the device; norms are one, matrices keep the size of what goes through them."""
    decoder = kind(spec, [], dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in shapes(spec):
        if len(shape) == 1:
            decoder.set_weight(name, torch.ones(shape, dtype=torch.float32, device=device))
            continue
        values = torch.empty(shape, dtype=dtype, device=device).normal_(0, shape[1] ** -0.5, generator=generator)
        decoder.set_weight(name, values)
    return decoder
