"""Cache writes and paged attention in Triton, for shapes that the kernels of csrc/gpu don't have.

Any block size and head size, on the canonical order of the storage: (block, offset, kv head, dimension). Rows are
packed and keys reduced as in csrc/gpu/attention.h: PART keys from position 0 on at a time, parts merged in order, by
the program that made them or by a second kernel, with the same operations. So a row's bits don't tell its batch.
fp8 is converted by its bits, which every GPU can.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 16  # (token, head of the group) rows of a program
TILE = 32  # keys between two looks at the running maximum
PART = 256  # keys that are reduced on their own
PLAIN, INT8, E4M3, E5M2 = 0, 1, 2, 3  # how keys and values are kept

_TILE = tl.constexpr(TILE)
_ROWS = tl.constexpr(ROWS)
_PART = tl.constexpr(PART)
_INT8 = tl.constexpr(INT8)
_E4M3 = tl.constexpr(E4M3)
_E5M2 = tl.constexpr(E5M2)
_LOG2E = tl.constexpr(1.4426950408889634)
_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to the nearest even integer


@triton.jit
def _decoded(stored, KIND: tl.constexpr):
    """float32 of what was loaded; scales come later."""
    if KIND == _E4M3:
        u = stored.to(tl.uint16)
        half = ((u & 0x80) << 8 | (u & 0x7F) << 7).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * 256.0
        return tl.where((u & 0x7F) == 0x7F, float("nan"), value)
    elif KIND == _E5M2:  # noqa: RET505 (Triton compiles what follows a return)
        return (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return stored.to(tl.float32)


@triton.jit
def _fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr):
    """Bits of x rounded to nearest even, saturated at LIMIT; NaN stays NaN."""
    u = x.to(tl.uint32, bitcast=True)
    sign = (u >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LIMIT)
    v = size.to(tl.uint32, bitcast=True)
    # Below the smallest normal: a multiple of the smallest step.
    small = (size * (1 << (BIAS - 1 + MANTISSA)) + _INTEGER) - _INTEGER
    DROP: tl.constexpr = 23 - MANTISSA
    large = (v + ((1 << (DROP - 1)) - 1) + ((v >> DROP) & 1) - ((127 - BIAS) << 23)) >> DROP
    bits = tl.where(v < ((128 - BIAS) << 23), small.to(tl.uint32), large)
    return (sign | tl.where(x != x, 0x7F, bits)).to(tl.uint8)


@triton.jit
def _encoded(x, scale, KIND: tl.constexpr):
    """x / scale as the 8-bit kinds store it."""
    if KIND == _INT8:
        y = x / scale
        y = tl.where(y != y, 0.0, y)  # 0 / 0 is stored as 0
        y = (y + _INTEGER) - _INTEGER
        return tl.minimum(tl.maximum(y, -127.0), 127.0).to(tl.int8)
    elif KIND == _E4M3:  # noqa: RET505 (Triton compiles what follows a return)
        return _fp8(x / scale, 3, 7, 448.0)
    else:
        return _fp8(x / scale, 2, 15, 57344.0)


@triton.jit
def cache_write(
    k, v, keys, values, k_scale, v_scale, slot_mapping,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Grid (rows, kv heads). k, v [rows, kv_heads, head]; keys, values [slots, kv_heads, head]; WIDE: power of two."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_mapping + row)
    if slot < 0:
        return
    d = tl.arange(0, WIDE)
    here = d < HEAD
    at = (row.to(tl.int64) * KV_HEADS + head) * HEAD + d
    to = (slot * KV_HEADS + head) * HEAD + d
    x = tl.load(k + at, mask=here, other=0.0)
    y = tl.load(v + at, mask=here, other=0.0)
    if KIND == 0:
        tl.store(keys + to, x, mask=here)
        tl.store(values + to, y, mask=here)
    else:
        x, y = x.to(tl.float32), y.to(tl.float32)
        if KIND == _INT8:
            x_scale = tl.max(tl.abs(x), 0) / 127.0
            y_scale = tl.max(tl.abs(y), 0) / 127.0
            tl.store(k_scale + slot * KV_HEADS + head, x_scale)
            tl.store(v_scale + slot * KV_HEADS + head, y_scale)
        else:
            x_scale, y_scale = tl.load(k_scale), tl.load(v_scale)
        tl.store(keys + to, _encoded(x, x_scale, KIND), mask=here)
        tl.store(values + to, _encoded(y, y_scale, KIND), mask=here)


@triton.jit
def _attend_part(
    q, keys, values, k_scale, v_scale, table, part, low, high, position, seen_rows, kv_head, scale, softcap, window,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr, WIDE_DOT: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted sum of one part's keys for all rows of the program."""
    d = tl.arange(0, WIDE)
    top = tl.full([_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([_ROWS], tl.float32)
    mixed = tl.zeros([_ROWS, WIDE], tl.float32)
    first = part * _PART
    if WINDOW:
        first = tl.maximum(first, low // _TILE * _TILE)
    for start in range(first, tl.minimum((part + 1) * _PART, high), _TILE):
        key = start + tl.arange(0, _TILE)
        there = key < high
        block = tl.load(table + key // BLOCK, mask=there, other=0).to(tl.int64)
        slot = (block * BLOCK + key % BLOCK) * KV_HEADS + kv_head
        at = slot[:, None] * HEAD + d[None, :]
        mask = there[:, None] & (d < HEAD)[None, :]
        stored_k = tl.load(keys + at, mask=mask, other=0)
        stored_v = tl.load(values + at, mask=mask, other=0)
        if KIND == 0:
            k, v = stored_k, stored_v
        else:
            k, v = _decoded(stored_k, KIND).to(q.dtype), _decoded(stored_v, KIND)
        if WIDE_DOT:
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
        if KIND == _INT8:
            s = s * tl.load(k_scale + slot, mask=there, other=0.0)[None, :]
            v = v * tl.load(v_scale + slot, mask=there, other=0.0)[:, None]
        if SOFTCAP:
            e = tl.exp2(s / softcap * (-2.0 * _LOG2E))
            s = softcap * ((1.0 - e) / (1.0 + e))  # tanh
        visible = there[None, :] & (key[None, :] <= position[:, None]) & seen_rows[:, None]
        if WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        s = tl.where(visible, s * _LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row without keys so far keeps weights of 0
        p = tl.exp2(s - safe[:, None])
        factor = tl.exp2(top - safe)
        total = tl.fma(total, factor, tl.sum(p, 1))
        v = v.to(q.dtype)
        mixed = tl.dot(p.to(q.dtype), v, mixed * factor[:, None], input_precision=EXACT)
        top = new_top
    return top, total, mixed


@triton.jit
def _merge(top, total, mixed, part_top, part_total, part_mixed):
    """Takes a part into the whole; one without keys changes nothing."""
    new = tl.maximum(top, part_top)
    safe = tl.where(new == float("-inf"), 0.0, new)
    old, added = tl.exp2(top - safe), tl.exp2(part_top - safe)
    total = tl.fma(total, old, part_total * added)
    return new, total, tl.fma(mixed, old[:, None] + tl.zeros_like(mixed), part_mixed * added[:, None])


@triton.jit
def attention(
    out, q, keys, values, k_scale, v_scale, tables, q_start, seq_lens, sums, states, parts, max_blocks, scale, softcap,
    window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles * parts if SPLIT, kv heads, sequences). q, out [rows, heads, head].

    SPLIT: each program has one part, and leaves weighted sums [rows, heads, parts, head] and states [..., 2].
    EXACT: precision of float32 products; WIDE_DOT: multiply in float32 (the interpreter can't multiply bfloat16).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, seq = tl.program_id(1), tl.program_id(2)
    tile = tl.program_id(0) // parts if SPLIT else tl.program_id(0)
    q_row = tl.load(q_start + seq)
    tokens = tl.load(q_start + seq + 1) - q_row
    first = tile * _ROWS
    if first >= tokens * GROUP:
        return
    before = tl.load(seq_lens + seq) - tokens
    row = first + tl.arange(0, _ROWS)
    real = row < tokens * GROUP
    position = before + row // GROUP
    last = tl.minimum(first + _ROWS, tokens * GROUP) - 1
    high = before + last // GROUP + 1
    low = tl.maximum(before + first // GROUP - window + 1, 0) if WINDOW else 0
    d = tl.arange(0, WIDE)
    query = (q_row + row // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
    mask = real[:, None] & (d < HEAD)[None, :]
    rows = tl.load(q + query[:, None] * HEAD + d[None, :], mask=mask, other=0.0)
    if WIDE_DOT:
        rows = rows.to(tl.float32)
    if KIND >= _E4M3:
        scale = scale * tl.load(k_scale)
    v_factor = tl.load(v_scale) if KIND >= _E4M3 else 1.0
    table = tables + seq.to(tl.int64) * max_blocks

    first_part, end_part = low // _PART, (high + _PART - 1) // _PART
    if SPLIT:
        part = tl.program_id(0) % parts
        if (part < first_part) | (part >= end_part):
            return
        top, total, mixed = _attend_part(
            rows, keys, values, k_scale, v_scale, table, part, low, high, position, real, kv_head, scale, softcap,
            window, KV_HEADS, HEAD, WIDE, BLOCK, KIND, SOFTCAP, WINDOW, EXACT, WIDE_DOT,
        )  # fmt: skip
        at = query * parts + part
        tl.store(sums + at[:, None] * HEAD + d[None, :], mixed * v_factor, mask=mask)
        tl.store(states + 2 * at, top, mask=real)
        tl.store(states + 2 * at + 1, total, mask=real)
    else:
        top = tl.full([_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([_ROWS], tl.float32)
        mixed = tl.zeros([_ROWS, WIDE], tl.float32)
        for part in range(first_part, end_part):
            part_top, part_total, part_mixed = _attend_part(
                rows, keys, values, k_scale, v_scale, table, part, low, high, position, real, kv_head, scale, softcap,
                window, KV_HEADS, HEAD, WIDE, BLOCK, KIND, SOFTCAP, WINDOW, EXACT, WIDE_DOT,
            )  # fmt: skip
            top, total, mixed = _merge(top, total, mixed, part_top, part_total, part_mixed * v_factor)
        result = mixed / total[:, None]
        tl.store(out + query[:, None] * HEAD + d[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def merge_parts(
    out, q_start, seq_lens, sums, states, parts, window,
    HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid (tokens of the longest sequence * heads, sequences)."""
    token, head, seq = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    q_row = tl.load(q_start + seq)
    tokens = tl.load(q_start + seq + 1) - q_row
    if token >= tokens:
        return
    position = tl.load(seq_lens + seq) - tokens + token
    first = tl.maximum(position - window + 1, 0) // _PART if WINDOW else 0
    d = tl.arange(0, WIDE)
    query = (q_row + token).to(tl.int64) * HEADS + head
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, WIDE], tl.float32)
    one = tl.arange(0, 1)
    for part in range(first, position // _PART + 1):
        at = query * parts + part + one
        part_mixed = tl.load(sums + at[:, None] * HEAD + d[None, :], mask=(d < HEAD)[None, :], other=0.0)
        top, total, mixed = _merge(
            top, total, mixed, tl.load(states + 2 * at), tl.load(states + 2 * at + 1), part_mixed
        )
    result = mixed / total[:, None]
    tl.store(
        out + (query + one)[:, None] * HEAD + d[None, :], result.to(out.dtype.element_ty), mask=(d < HEAD)[None, :]
    )
