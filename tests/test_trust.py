"""No byte from outside becomes code: the source has no call that could do it, and no check that -O removes."""

import ast
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "server", "csrc", "docker")
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "code", "pty"}
CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "torch.hub.load", "os.system", "os.popen",
    "subprocess.getoutput", "subprocess.getstatusoutput", "np.load", "numpy.load", "recv_pyobj", "send_pyobj",
}  # fmt: skip
# Where no byte comes from outside, an assert states an invariant.
INVARIANTS = ("engine/core/", "engine/kv/", "engine/worker/", "engine/bench/", "engine/simulate/")


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def narrows(test: ast.expr) -> bool:
    """Says to the type checker what the code around it knows, and checks nothing."""
    text = ast.unparse(test)
    return text.endswith(" is not None") or text.startswith(("isinstance(self", "isinstance(parser"))


def faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
            yield from ((node.lineno, f"import {name}") for name in names if name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.lineno, f"from {node.module}"
        elif isinstance(node, ast.Assert) and not narrows(node.test):
            yield node.lineno, "assert: a check that `python -O` removes"
        elif isinstance(node, ast.Call):
            name = called(node)
            if name in CALLS or name.rpartition(".")[2] in ("recv_pyobj", "send_pyobj"):
                yield node.lineno, name
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", keyword.value)
                if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and value is not False:
                    yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"
                if keyword.arg == "weights_only" and value is not True:
                    yield node.lineno, "weights_only"


def test_the_source_is_looked_at() -> None:
    names = [name for name, _ in sources()]
    assert {"engine/process.py", "engine/transport.py", "server/gate.py", "server/parsers/pythonic.py"} <= set(names)


def test_a_fault_is_seen() -> None:
    bad = (
        "import pickle\nfrom marshal import loads\neval(x)\ntorch.load(f)\nassert x\nrun(c, shell=True)\ns.recv_pyobj()"
    )
    assert len(list(faults(ast.parse(bad)))) == 7
    assert not list(faults(ast.parse("model.eval()\nre.compile(x)\nast.literal_eval(x)\nrun(c, shell=False)")))


def test_nothing_that_comes_from_outside_can_become_code() -> None:
    found = [
        f"{name}:{line}: {what}"
        for name, tree in sources()
        for line, what in faults(tree)
        if not (what.startswith("assert") and name.startswith(INVARIANTS))
    ]
    assert not found


def needed(name: str, found: set[str]) -> set[str]:
    """Everything that is installed with `name`, by what the packages themselves say."""
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # of another system or Python
        return found
    for requirement in map(Requirement, lines):
        child = canonicalize_name(requirement.name)
        if child not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(child)
            needed(child, found)
    return found


def test_every_package_that_is_installed_with_the_program_has_one_pinned_version() -> None:
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().split("\n") if line and line[0] != "#"]
    assert all(str(pin.specifier).startswith("==") and not pin.url for pin in pins)
    assert needed("octavo", set()) <= {canonicalize_name(pin.name) for pin in pins}
