"""The walls between the rooms: who may import whom, and what must not be loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVER_MAY_IMPORT = {
    "api",
    "bench",
    "client",
    "config",
    "errors",
    "text",
    "validate",
    "build",
    "llm",
    "native",
    "replicas",
    "simulate",
}


def modules_loaded_by(statement: str) -> set[str]:
    out = subprocess.run(
        [sys.executable, "-c", f"import sys\n{statement}\nprint(*sorted(m.split('.')[0] for m in sys.modules))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(out.stdout.split())


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def test_core_and_kv_load_neither_torch_nor_numpy() -> None:
    names = [f"engine.{r}.{p.stem}" for r in ("core", "kv") for p in (ROOT / "engine" / r).glob("*.py")]
    loaded = modules_loaded_by("import " + ", ".join(n.removesuffix(".__init__") for n in names))
    assert not loaded & {"torch", "numpy", "transformers", "zmq"}


def test_the_server_process_loads_neither_torch_nor_transformers() -> None:
    loaded = modules_loaded_by("import server.app, server.cli, engine.client, engine.config")
    assert not loaded & {"torch", "transformers"}


def test_the_native_path_loads_no_torch() -> None:
    assert "torch" not in modules_loaded_by("import engine.process, engine.worker.native_executor")


@pytest.mark.parametrize("path", files("server"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_server_knows_only_the_public_face_of_the_engine(path: Path) -> None:
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "engine" and len(parts) > 1:
            assert parts[1] in SERVER_MAY_IMPORT, f"{path.name} imports {name}"


@pytest.mark.parametrize("room", ["worker", "attention", "model", "sampling"])
def test_tensors_know_no_requests(room: str) -> None:
    for path in files(f"engine/{room}"):
        for name in imports_of(path):
            assert name not in {"engine.core.request", "engine.core.scheduler", "engine.core.engine"}, path
            assert not name.startswith(("server", "engine.kv")), path


@pytest.mark.parametrize("room", ["core", "kv"])
def test_bookkeeping_does_no_io(room: str) -> None:
    forbidden = {"os", "io", "socket", "pathlib", "subprocess", "zmq", "torch", "numpy", "server"}
    for path in files(f"engine/{room}"):
        assert not {n.split(".")[0] for n in imports_of(path)} & forbidden, path
