"""Matrix products of every kind of weight and instruction set, seen through a model that is nothing but a LM head.

The layer's weights are zero and there is no final norm, so the logits of a token are lm_head . embed[token].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine import native
from engine.model.gguf import dequantise
from engine.model.spec import DecoderSpec, LayerSpec
from tests.kernels.attention_oracle import round_bf16

Q4_0, Q4_1, Q8_0, Q4_K = 2, 3, 8, 12
KINDS: dict[str, tuple[int, int]] = {  # W_* of dense data, else the ggml type of blocks
    "f32": (native.W_F32, 0),
    "bf16": (native.W_BF16, 0),
    "q8": (native.W_Q8, 0),
    "q8_0": (-1, Q8_0),
    "q4_0": (-1, Q4_0),
    "q4_1": (-1, Q4_1),
    "q4_k": (-1, Q4_K),
}


def random_blocks(ggml_type: int, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Random GGUF blocks with scales of a sane size, [rows, bytes of a row]."""
    size, count = {Q4_0: (18, 32), Q4_1: (20, 32), Q8_0: (34, 32), Q4_K: (144, 256)}[ggml_type]
    blocks = rng.integers(0, 256, (rows, cols // count, size)).astype(np.uint8)
    halves = 2 if ggml_type in (Q4_1, Q4_K) else 1
    scales = (rng.standard_normal((rows, cols // count, halves)) * 0.01).astype(np.float16)
    blocks[:, :, : 2 * halves] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


class Head:
    """One LM head [vocab, hidden] and the embeddings that it multiplies."""

    def __init__(self, kind: str, vocab: int, hidden: int) -> None:
        rng = np.random.default_rng(vocab + hidden)
        self.vocab, self.hidden = vocab, hidden
        self.quant, self.ggml = KINDS[kind]
        self.embed = (rng.standard_normal((vocab, hidden)) * np.exp(rng.standard_normal((vocab, 1)))).astype(np.float32)
        self.embed_blocks: tuple[np.ndarray, int] | None = None  # embeddings as GGUF blocks, and their type
        self.weights: np.ndarray
        if self.ggml:
            self.blocks = random_blocks(self.ggml, vocab, hidden, rng)
            self.weights = dequantise(self.blocks, self.ggml).reshape(vocab, hidden)
        else:
            self.weights = (rng.standard_normal((vocab, hidden)) / np.sqrt(hidden)).astype(np.float32)

    def expected(self, tokens: np.ndarray) -> np.ndarray:
        """float64, of the operands as the kernels see them."""
        x, w = self.embed[tokens].astype(np.float64), self.weights.astype(np.float64)
        if self.quant == native.W_BF16:
            x, w = round_bf16(self.embed[tokens]), round_bf16(self.weights)
        elif self.quant != native.W_F32:
            x = quantised(self.embed[tokens])
        if self.quant == native.W_Q8:
            w = kept_as_q8(self.weights)
        return x @ w.T

    def model(self, kernels: native.Kernels) -> native.Model:
        h = self.hidden
        spec = DecoderSpec(
            family="test",
            vocab_size=self.vocab,
            hidden_size=h,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_size=16,
            intermediate_size=16,
            max_position=4096,
            final_norm=False,
            layers=(LayerSpec(rope=-1),),
        )
        self.spec = spec
        model = native.Model(kernels, spec, "float32" if self.quant == native.W_F32 else "bfloat16")
        layer = {"attn_norm": (h, 1), "mlp_norm": (h, 1), "q": (16, h), "k": (16, h), "v": (16, h), "o": (h, 16)}
        layer |= {"gate": (16, h), "up": (16, h), "down": (h, 16)}
        for name, (rows, cols) in layer.items():
            zeros = np.zeros((rows, cols), np.float32)
            model.set(f"layers.0.{name}", zeros, native.F32, rows, cols, native.W_F32 if cols == 1 else native.W_BF16)
        if self.embed_blocks:
            model.set_gguf("embed", *self.embed_blocks, self.vocab, h)
        else:
            model.set("embed", self.embed, native.F32, self.vocab, h, native.W_F32)
        if self.ggml:
            model.set_gguf("lm_head", self.blocks, self.ggml, self.vocab, h)
        else:
            model.set("lm_head", self.weights, native.F32, self.vocab, h, self.quant)
        model.finish()
        return model


class Product:
    """Runs a head on one instruction set."""

    def __init__(self, kernels: native.Kernels, head: Head, most: int = 600) -> None:
        self.model = head.model(kernels)
        self.vocab, self.kernels = head.vocab, kernels
        blocks = most // 16 + 1
        self.size = kernels.kv_block_bytes(head.spec, 16, native.F32) * blocks
        self.kv = native.KV(kernels.alloc(self.size), blocks, 16, native.F32)
        self.table = np.arange(blocks, dtype=np.int32)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        n, at = len(tokens), native.pointer
        tokens = tokens.astype(np.int32)
        ends, zero, rows = np.array([0, n], np.int32), np.zeros(1, np.int32), np.arange(n, dtype=np.int32)
        logits = np.full((n, self.vocab), np.nan, np.float32)
        batch = native.Batch(n_rows=n, n_seqs=1, n_logits=n, tokens=at(tokens), q_start=at(ends), pos_start=at(zero))
        batch.tables, batch.table_stride, batch.table_line = at(self.table), len(self.table), at(zero)
        batch.logit_rows, batch.logits = at(rows), at(logits)
        self.model.step(self.kv, batch)
        return logits

    def close(self) -> None:
        self.kernels.free(self.kv.data, self.size)
        self.model.close()


def groups_of_32(x: np.ndarray) -> np.ndarray:
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32), np.float32)
    padded[:, : x.shape[1]] = x
    return padded.reshape(len(x), -1, 32)


def quantised(x: np.ndarray) -> np.ndarray:
    """Activations as int8 with a scale per row and group of 32, back in float64."""
    groups = groups_of_32(x)
    top = np.abs(groups).max(-1, keepdims=True)
    q = np.rint(groups * (np.float32(127) / np.maximum(top, np.float32(1e-30))))
    values = q.astype(np.float64) * (top * np.float32(1 / 127)).astype(np.float64)
    return values.reshape(len(x), -1)[:, : x.shape[1]]


def kept_as_q8(w: np.ndarray) -> np.ndarray:
    groups = groups_of_32(w)
    scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    q = np.clip(np.rint(groups / np.maximum(scale, np.float32(1e-30))), -127, 127)
    return (q.astype(np.float64) * scale.astype(np.float64)).reshape(len(w), -1)[:, : w.shape[1]]


def all_sets() -> Iterator[native.Kernels]:
    for isa in native.load().isas:
        yield native.load(isa, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_products_follow_the_definition_at_odd_sizes(kind: str) -> None:
    blocks_of = {Q4_K: (256, 768), Q8_0: (32, 96, 576)}
    for hidden in blocks_of.get(KINDS[kind][1], (32, 576) if KINDS[kind][1] else (30, 72, 101, 576)):
        head = Head(kind, 131, hidden)
        tokens = np.random.default_rng(0).integers(0, 131, 70)
        want = head.expected(tokens)
        for kernels in all_sets():
            product = Product(kernels, head)
            for rows in (1, 5, 70):
                got = product(tokens[:rows])
                error = np.abs(got - want[:rows]).max() / np.abs(want).max()
                assert error < 3e-6, (kernels.isa, hidden, rows, error)
            product.close()


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it_or_the_threads(kind: str) -> None:
    head = Head(kind, 97, 256)
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 97, 512)
    for isa in native.load().isas:
        product = Product(native.load(isa, 2), head)
        whole = product(tokens).view(np.int32)
        for size in (*range(1, 18), 31, 32, 33, 40, 48, 63, 64, 65, 100, 200):
            at = int(rng.integers(0, 512 - size))
            part = product(tokens[at : at + size]).view(np.int32)
            np.testing.assert_array_equal(part, whole[at : at + size], err_msg=f"{isa}: {size} rows")
        for threads in (1, 3, 7):
            native.load(isa, threads)
            np.testing.assert_array_equal(product(tokens).view(np.int32), whole, err_msg=f"{isa}: {threads} threads")
        native.load(isa, 2)
        product.close()


@pytest.mark.parametrize(("vocab", "kind"), [(49152, "bf16"), (151936, "q8"), (32003, "q4_1"), (32003, "bf16")])
def test_large_vocabularies_are_whole(vocab: int, kind: str) -> None:
    head = Head(kind, vocab, 32)
    tokens = np.array([0, vocab - 1, vocab // 2])
    want = head.expected(tokens)
    product = Product(native.load("", 2), head)
    got = product(tokens)
    product.close()
    assert np.abs(got - want).max() < 3e-6 * np.abs(want).max()


@pytest.mark.parametrize("ggml_type", [Q4_0, Q4_1, Q8_0, Q4_K])
def test_embeddings_in_blocks_are_looked_up_as_they_dequantise(ggml_type: int) -> None:
    """The head is an identity, so the logits are the embeddings."""
    size = 256
    head = Head("f32", size, size)
    head.weights = np.eye(size, dtype=np.float32)
    head.embed_blocks = random_blocks(ggml_type, size, size, np.random.default_rng(ggml_type)), ggml_type
    product = Product(native.load("", 2), head)
    got = product(np.arange(size))
    product.close()
    want = dequantise(head.embed_blocks[0], ggml_type).reshape(size, size)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
