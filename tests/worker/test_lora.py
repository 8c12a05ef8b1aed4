"""Adapters beside the base: mixed in one batch, each gets the bits that it gets alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.api import AddRequest, SamplingParams
from engine.core.engine import EngineCore
from engine.core.plan import Executor, Plan, Row, Sampled, SlotParams
from engine.core.settings import CoreSettings
from engine.errors import ConfigError, InvalidRequest, RequestFailed
from engine.model.config import load_spec
from engine.model.lora import LoraAdapter
from engine.worker.native_executor import NativeExecutor
from engine.worker.settings import ExecutorSettings
from engine.worker.torch_executor import TorchExecutor
from tests.worker.driver import Driver, Job, prompts, tiny_gguf, tiny_lora, tiny_model

SETTINGS = ExecutorSettings(
    max_model_len=256,
    max_num_seqs=8,
    max_batched_tokens=512,
    num_blocks=64,
    dtype="float32",
    kv_dtype="float32",
    quantization="none",
    image_cache=False,
)
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {
        "all": tiny_lora(directory / "all", 1, MODULES),
        "few": tiny_lora(directory / "few", 2, MODULES[:2], rank=8, use_rslora=True),
    }


def jobs(adapter: str) -> list[Job]:
    params = SlotParams(temperature=0.9, seed=4, logprobs=1, adapter=adapter)
    return [Job(prompt, params, 5) for prompt in prompts([30, 5])]


def generate(executor: Executor, names: list[str], adapters: dict[str, Path]) -> list[list[Sampled]]:
    """What two prompts get from each of the named models, all in one batch."""
    driver = Driver(executor, executor.start())
    for name in names:
        if name:
            executor.load_adapter(name, str(adapters[name]))
    done = driver.generate([job for name in names for job in jobs(name)], chunk=11)
    executor.close()
    return [job.sampled for job in done]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (NativeExecutor, {}),
        (NativeExecutor, {"dtype": "bfloat16", "kv_dtype": "bfloat16"}),
        (NativeExecutor, {"dtype": "bfloat16", "kv_dtype": "int8", "quantization": "int8"}),
        (NativeExecutor, {"dtype": "bfloat16", "kv_dtype": "bfloat16", "quantization": "auto"}),
        (TorchExecutor, {}),
    ],
    ids=["f32", "bf16", "int8", "q4_1", "torch"],
)
def test_two_adapters_and_the_base_in_one_batch_give_the_bits_of_each_alone(
    model: Path, adapters: dict[str, Path], kind: type, changes: dict[str, object]
) -> None:
    settings = replace(SETTINGS, **changes)
    path = tiny_gguf(model, gguf.GGMLQuantizationType.Q4_1) if settings.quantization == "auto" else model

    def executor() -> Executor:
        made: Executor = kind(path, load_spec(path), settings)
        return made

    mixed = generate(executor(), ["all", "", "few"], adapters)
    alone = [sampled for name in ("all", "", "few") for sampled in generate(executor(), [name], adapters)]
    assert mixed == alone
    assert mixed[0] != mixed[2] != mixed[4] != mixed[0]


def test_an_adapter_is_the_base_with_its_product_added(model: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """Against a checkpoint with W + alpha / r * B A written out."""
    weights = load_file(model / "model.safetensors")
    lora = load_file(adapters["all"] / "adapter_model.safetensors")
    for name in [name for name in lora if "lora_A" in name]:
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[target] = weights[target] + 2.0 * lora[name.replace("lora_A", "lora_B")] @ lora[name]
    shutil.copytree(model, tmp_path / "merged", ignore=shutil.ignore_patterns("*.safetensors", "*.gguf"))
    save_file(weights, tmp_path / "merged" / "model.safetensors")

    merged = generate(NativeExecutor(tmp_path / "merged", load_spec(model), SETTINGS), [""], adapters)
    served = generate(NativeExecutor(model, load_spec(model), SETTINGS), ["all"], adapters)
    for a, b in zip(served, merged, strict=True):
        assert [s.token for s in a] == [s.token for s in b]
        assert np.abs([s.logprob - t.logprob for s, t in zip(a, b, strict=True)]).max() < 1e-3


@pytest.mark.parametrize("kind", [NativeExecutor, TorchExecutor])
def test_adapters_come_and_go_while_the_executor_runs(model: Path, adapters: dict[str, Path], kind: type) -> None:
    executor = kind(model, load_spec(model), SETTINGS)
    driver = Driver(executor, executor.start())
    base = [job.sampled for job in driver.generate(jobs(""))]
    row = Row(0, 0, (1,), 0, (0,), sample=True)
    params = msgspec.structs.replace(SlotParams(), adapter="all")
    with pytest.raises(RequestFailed, match="adapter 'all' is not loaded"):
        driver.run(Plan(0, (row,), slots=((0, params),)))
    executor.load_adapter("all", str(adapters["all"]))
    assert [job.sampled for job in driver.generate(jobs("all"))] != base
    assert [job.sampled for job in driver.generate(jobs(""))] == base
    executor.unload_adapter("all")
    executor.unload_adapter("all")
    with pytest.raises(RequestFailed, match="adapter 'all' is not loaded"):
        driver.run(Plan(0, (row,), slots=((0, params),)))
    assert [job.sampled for job in driver.generate(jobs(""))] == base
    executor.close()


def test_the_engine_takes_adapters_at_run_time_and_mixes_them(model: Path, adapters: dict[str, Path]) -> None:
    executor = NativeExecutor(model, load_spec(model), SETTINGS)
    core = EngineCore(executor, executor.start(), CoreSettings(), frozenset(), None)
    prompt = prompts([40])[0]

    def ask(*names: str) -> dict[str, list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=6)
        for name in names:
            core.add(AddRequest(id=name or "base", prompt=prompt, params=params, arrival=0.0, adapter=name))
        got: dict[str, list[int]] = {name or "base": [] for name in names}
        while core.has_work():
            for delta in core.step().deltas:
                got[delta.id].extend(delta.tokens)
                if delta.error:
                    raise RequestFailed(delta.error)
        return got

    with pytest.raises(RequestFailed, match="adapter 'all' is not loaded"):
        ask("all")
    for name, path in adapters.items():
        core.control("load_adapter", {"name": name, "path": str(path)})
    alone = ask("all") | ask("") | ask("few")
    assert ask("few", "all", "") == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 3

    # Another adapter under a name that has cached prefixes: nothing of the old one is used.
    core.control("load_adapter", {"name": "all", "path": str(adapters["few"])})
    assert ask("all")["all"] == alone["few"]
    core.add(AddRequest(id="r", prompt=prompt, params=SamplingParams(max_tokens=2), arrival=0.0, adapter="few"))
    with pytest.raises(InvalidRequest, match="in use"):
        core.control("unload_adapter", {"name": "few"})
    core.abort("r")
    while core.has_work():
        core.step()
    core.control("unload_adapter", {"name": "few"})
    for command, argument, reason in (
        ("load_adapter", {"name": "x"}, "needs a name and a path"),
        ("load_adapter", {"name": "x", "path": "/nowhere"}, "no LoRA adapter"),
        ("dance", {}, "'dance' is not a command"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            core.control(command, argument)
    core.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "uses use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "whole number from 1"),
        ({"r": True}, "whole number from 1"),
        ({"r": 10**400}, "whole number from 1"),
        ({"r": 5}, "its rank is 5"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"lora_alpha": 1e300}, "lora_alpha must be a number"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_in_one_line(
    model: Path, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    directory = tiny_lora(tmp_path / "adapter", 1, MODULES[:1])
    config = json.loads((directory / "adapter_config.json").read_text()) | change
    (directory / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=reason):
        LoraAdapter(directory, load_spec(model))


def test_an_adapter_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    spec = load_spec(model)
    directory = tiny_lora(tmp_path / "adapter", 1, MODULES[:1])
    tensors = load_file(directory / "adapter_model.safetensors")

    def refused(changed: dict[str, np.ndarray], reason: str) -> None:
        save_file(changed, directory / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=reason):
            LoraAdapter(directory, spec)

    refused({name.replace("layers.0", "layers.9"): t for name, t in tensors.items()}, "layers.9.*doesn't have")
    refused({name: t[:-1] if "lora_B" in name else t for name, t in tensors.items()}, "changes .383, 192., not .384,")
    refused({name: t for name, t in tensors.items() if "1.self_attn.q_proj.lora_B" not in name}, "half of model.")
    refused({name.replace("lora_A", "lora_C"): t for name, t in tensors.items()}, "no lora_A or lora_B")
    with pytest.raises(ConfigError, match="no LoRA adapter"):
        LoraAdapter(model, spec)
