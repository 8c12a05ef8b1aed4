"""Drives an executor through plans as a scheduler would, with the schedule in the test's hands."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import msgspec
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from engine.core.plan import LAST_SAMPLED, Executor, Geometry, KVOp, Plan, Row, Sampled, SlotParams

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INTER = 515, 192, 3, 6, 2, 64, 256


def tiny_model(directory: Path, seed: int = 0, **config: object) -> Path:
    """A Llama of random weights in Hugging Face form, large enough that its tokens differ from each other."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "intermediate_size": INTER,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **config,
    }
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (rng.normal(size=(rows, cols)) * 1.5 / cols**0.5).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN) * 2,
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows, cols in (
            ("self_attn.q_proj", HEADS * HEAD_SIZE, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_SIZE, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_SIZE, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_SIZE),
            ("mlp.gate_proj", INTER, HIDDEN),
            ("mlp.up_proj", INTER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTER),
        ):
            weights[f"{at}{name}.weight"] = matrix(rows, cols)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def tiny_gguf(model: Path, quantisation: gguf.GGMLQuantizationType) -> Path:
    """The tiny model's matrices as blocks of a GGUF file. Its rows are not put in GGUF's order for rotation, so it
    is another model than the directory, just as good for comparing schedules."""
    path = model / f"{quantisation.name}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_token_list([f"<{i}>" for i in range(VOCAB)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    with safe_open(model / "model.safetensors", "np") as weights:
        for name in weights.keys():  # noqa: SIM118 (no mapping: it can't be iterated)
            stem = names.get_name(name.removesuffix(".weight"))
            values = weights.get_tensor(name)
            kept = quantisation if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(f"{stem}.weight", gguf.quants.quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_lora(directory: Path, seed: int, modules: Many[str], rank: int = 4, **config: object) -> Path:
    """An adapter of random matrices for some modules of all layers, in PEFT's form."""
    rng = np.random.default_rng(seed)
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE),
        "mlp.gate_proj": (INTER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTER),
    }
    tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            out, inner = sizes[module]
            at = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{at}.lora_A.weight"] = rng.normal(size=(rank, inner)).astype(np.float32) / inner**0.5
            tensors[f"{at}.lora_B.weight"] = rng.normal(size=(out, rank)).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2.0 * rank, "target_modules": list(modules), **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


@dataclass
class Job:
    """One sequence: what is asked of it and what it got."""

    prompt: tuple[int, ...]
    params: SlotParams
    new_tokens: int
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.params = msgspec.structs.replace(self.params, prompt_len=len(self.prompt), prompt=self.prompt)

    @property
    def done(self) -> bool:
        return len(self.sampled) >= self.new_tokens


class Driver:
    """Blocks and slots for an executor. Blocks are handed out in a shuffled order."""

    def __init__(self, executor: Executor, geometry: Geometry, seed: int = 0) -> None:
        self.executor = executor
        self.geometry = geometry
        self.rng = random.Random(seed)
        self.free = list(range(geometry.num_blocks))
        self.rng.shuffle(self.free)
        self.steps = 0

    def run(self, plan: Plan) -> tuple:
        self.executor.submit(plan)
        return self.executor.collect().rows

    def generate(self, jobs: Many[Job], *, chunk: int = 64, together: bool = True, swap: bool = False) -> list[Job]:
        """Run jobs to their end: all in each step, or one after another; prompts `chunk` tokens at a time.

        swap: now and then a sequence's blocks go to the host and come back elsewhere.
        """
        for group in [list(jobs)] if together else [[job] for job in jobs]:
            slots = self.rng.sample(range(self.geometry.max_num_seqs), len(group))
            taken = tuple((slot, job.params) for slot, job in zip(slots, group, strict=True))
            while any(not job.done for job in group):
                active = [(slot, job) for slot, job in zip(slots, group, strict=True) if not job.done]
                self.rng.shuffle(active)
                ops = self.move(active) if swap and self.steps % 3 == 2 else ()
                rows = tuple(self.row(slot, job, chunk, whole_table=bool(ops)) for slot, job in active)
                results = self.run(Plan(self.steps, rows, ops, taken))
                taken = ()
                self.steps += 1
                for (_, job), row, result in zip(active, rows, results, strict=True):
                    job.computed += len(row.tokens)
                    job.sampled.extend(result.sampled)
                    job.tokens.extend(s.token for s in result.sampled)
            for job in group:
                self.free.extend(job.table)
                job.table.clear()
            self.rng.shuffle(self.free)
        return list(jobs)

    def row(self, slot: int, job: Job, chunk: int, *, whole_table: bool) -> Row:
        tokens = tuple(job.tokens[job.computed : job.computed + chunk])
        end = job.computed + len(tokens)
        before = len(job.table)
        while len(job.table) * self.geometry.block_size < end:
            job.table.append(self.free.pop())
        first = 0 if whole_table else before
        return Row(slot, job.computed, tokens, first, tuple(job.table[first:]), sample=end == len(job.tokens))

    def move(self, active: list[tuple[int, Job]]) -> tuple[KVOp, ...]:
        """One sequence out to the host and in again, into other blocks."""
        _, job = self.rng.choice(active)
        host = self.rng.sample(range(self.geometry.host_blocks), len(job.table))
        out = [KVOp("out", block, at) for block, at in zip(job.table, host, strict=True)]
        self.free.extend(job.table)
        self.rng.shuffle(self.free)
        job.table = [self.free.pop() for _ in job.table]
        self.rng.shuffle(out)
        return tuple(out) + tuple(KVOp("in", at, block) for at, block in zip(host, job.table, strict=True))


def prompts(lengths: Many[int], seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(VOCAB) for _ in range(n)) for n in lengths]


def overlapped(driver: Driver, job: Job, slot: int) -> Job:
    """The job with two steps in flight: every token but the first is still unknown when its step is submitted."""
    job.table = [driver.free.pop() for _ in range(-(-(len(job.prompt) + job.new_tokens) // driver.geometry.block_size))]
    first = Row(slot, 0, job.prompt, 0, tuple(job.table), sample=True)
    driver.executor.submit(Plan(0, (first,), slots=((slot, job.params),)))
    for i in range(job.new_tokens - 1):
        driver.executor.submit(Plan(i + 1, (Row(slot, len(job.prompt) + i, (LAST_SAMPLED,), sample=True),)))
        job.sampled.extend(driver.executor.collect().rows[0].sampled)
    job.sampled.extend(driver.executor.collect().rows[0].sampled)
    driver.free.extend(job.table)
    return replace(job)
