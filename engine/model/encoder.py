"""The forward pass of an encoder in torch, over several texts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from engine.errors import ConfigError
from engine.model.encoder_config import EncoderSpec
from engine.model.safetensors_files import SafetensorsFiles

ROWS = 16  # of a matrix product are a multiple of this: smaller ones take other ways

Pair = tuple[torch.Tensor, torch.Tensor]  # weight and bias of a projection or a norm

_BERT = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_DISTILBERT = {
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "o": "attention.out_lin",
    "attn_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_norm": "output_layer_norm",
}


class Encoder:
    """An encoder's weights on a device. `forward` may be called from several threads at once."""

    def __init__(self, spec: EncoderSpec, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError for a weight that is missing or of another shape."""
        self.spec = spec
        self._device = device
        load = _Weights(spec, path, dtype, device)
        hidden, inter = spec.hidden_size, spec.intermediate_size
        self._words = load.tensor("embeddings.word_embeddings.weight", spec.vocab_size, hidden)
        self._positions = load.tensor("embeddings.position_embeddings.weight", spec.positions, hidden)
        if spec.family != "distilbert":  # every token is of type 0
            self._positions = self._positions + load.tensor("embeddings.token_type_embeddings.weight", None, hidden)[0]
        self._norm = load.pair("embeddings.LayerNorm", hidden)
        distil = spec.family == "distilbert"
        names, stem = (_DISTILBERT, "transformer.layer") if distil else (_BERT, "encoder.layer")
        shapes = {"up": (inter, hidden), "down": (hidden, inter), "attn_norm": (hidden,), "mlp_norm": (hidden,)}
        self._layers: list[dict[str, Pair]] = []
        for i in range(spec.num_layers):
            layer = {
                role: load.pair(f"{stem}.{i}.{name}", *shapes.get(role, (hidden, hidden)))
                for role, name in names.items()
            }
            qkv = [layer.pop(role) for role in ("q", "k", "v")]
            layer["qkv"] = (torch.cat([w for w, _ in qkv]), torch.cat([b for _, b in qkv]))
            self._layers.append(layer)

    @torch.inference_mode()
    def forward(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Token ids of each text -> its float32 hidden states [tokens, hidden_size].

        The texts' rows are multiplied together, and attend each within its text.
        """
        lengths = [len(text) for text in texts]
        rows = sum(lengths)
        padding = -rows % ROWS
        tokens = torch.tensor([*(token for text in texts for token in text), *[0] * padding]).to(self._device)
        places = torch.cat(
            [*(self._places(part) for part in torch.split(tokens[:rows], lengths)), tokens.new_zeros(padding)]
        )
        x = self._normed(self._words[tokens] + self._positions[places], self._norm)
        for layer in self._layers:
            qkv = functional.linear(x, *layer["qkv"])
            mixed = torch.zeros_like(x)
            for part, out in zip(torch.split(qkv[:rows], lengths), torch.split(mixed[:rows], lengths), strict=True):
                out.copy_(self._attend(part.clone()))  # a copy lies the same for every text
            x = self._mixed(x, mixed, layer)
        return [part.float() for part in torch.split(x[:rows], lengths)]

    @torch.inference_mode()
    def packs_without_trace(self, most: int) -> bool:
        """Does every row come out with the same bits, wherever it stands among up to `most` rows?

        A matrix product may add in another order for another number of rows, or for another row. That order is a
        function of the shapes alone, so that one random row, repeated, shows it. `most` is a multiple of ROWS.
        """
        layer = self._layers[0]
        row = torch.randn(1, self.spec.hidden_size, generator=torch.Generator().manual_seed(0))
        row = row.to(self._device, self._words.dtype)
        results = []
        for rows in range(ROWS, most + 1, ROWS):
            x = row.repeat(rows, 1)
            qkv = functional.linear(x, *layer["qkv"])
            results += [torch.cat([qkv, self._mixed(x, qkv[:, : x.shape[1]], layer)], 1)]
        return all(torch.equal(result, results[0][:1].expand_as(result)) for result in results)

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """One text's rows of queries, keys and values side by side -> [tokens, hidden_size]."""
        q, k, v = qkv.view(len(qkv), 3, self.spec.num_heads, -1).permute(1, 2, 0, 3)[
            :, None
        ]  # [1, heads, tokens, size]
        return functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(len(qkv), -1)

    def _mixed(self, x: torch.Tensor, mixed: torch.Tensor, layer: dict[str, Pair]) -> torch.Tensor:
        """All of a layer behind its attention, row by row."""
        x = self._normed(x + functional.linear(mixed, *layer["o"]), layer["attn_norm"])
        inner = self._activate(functional.linear(x, *layer["up"]))
        return self._normed(x + functional.linear(inner, *layer["down"]), layer["mlp_norm"])

    def _places(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the position table for one text [tokens]."""
        padding = self.spec.padding
        if padding < 0:
            return torch.arange(len(tokens), device=self._device)
        real = (tokens != padding).long()
        return real.cumsum(0) * real + padding

    def _normed(self, x: torch.Tensor, norm: Pair) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], *norm, self.spec.norm_eps)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.activation == "relu":
            return functional.relu(x)
        return functional.gelu(x, approximate="tanh" if self.spec.activation == "gelu_tanh" else "none")


class _Weights:
    """Reads tensors by the names of the bare model, whatever prefix the file has."""

    def __init__(self, spec: EncoderSpec, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._files = SafetensorsFiles(path)
        names = self._files.names()
        self._prefix = next(
            (p for p in (f"{spec.family}.", "") if any(n.startswith(f"{p}embeddings.") for n in names)), ""
        )
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, *shape: int | None) -> torch.Tensor:
        """A weight of this shape; None stands for any extent. Raises ConfigError."""
        full = self._prefix + name
        stored = self._files.tensors.get(full)
        if stored is None:
            raise ConfigError(f"{self._files.directory} has no tensor {full}")
        if len(stored.shape) != len(shape) or any(
            want not in (None, got) for want, got in zip(shape, stored.shape, strict=True)
        ):
            raise ConfigError(f"{self._files.directory}: tensor {full} has the shape {stored.shape}, not {shape}")
        data, kind = self._files.read(full)
        if kind not in ("f32", "f16", "bf16"):
            raise ConfigError(f"{self._files.directory}: tensor {full} is stored as {kind}; float types are supported")
        tensor = torch.from_numpy(data.copy())
        if kind == "bf16":
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(self._device, self._dtype)

    def pair(self, name: str, *shape: int) -> Pair:
        """Weight and bias."""
        return self.tensor(f"{name}.weight", *shape), self.tensor(f"{name}.bias", shape[0])
