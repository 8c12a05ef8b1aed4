"""Every command and example of README.md and docs/ runs, against one real server; links and tables are true.

All ```sh and ```python blocks are run. Two kinds of commands are read instead: `octavo serve` never ends, so its flags
are resolved by `octavo config show`; plans and benchmarks but `bench serve` take minutes, so theirs are parsed alone.
What can't run here is in NOT_RUN, with the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from engine.config import OPTIONS
from server.app import ROUTES
from server.protocol import HOSTED_ONLY, REFUSED
from tests.e2e.serving import Server, serving

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HERE = "127.0.0.1:8000"  # where the documents say that the server is

# First word of a block's first command -> why it can't run in a test.
NOT_RUN = {
    "make": "sets up the whole checkout; the test suite itself runs below `make test`",
    "docker": "needs a Docker engine",
    "kubectl": "needs a cluster; tests/ops checks the manifests",
    "apt": "changes the system",
    "pip": "changes the environment that the tests run in",
    "prometheus": "never ends; tests/ops runs it",
    "systemctl": "needs a running systemd",
    "python -m csrc.build": "compiles the kernels that other tests are using",
}


OCTAVO = """\
#!/bin/sh
export PYTHONPATH={root}
case "$1 $2" in
  serve*) shift; exec {python} -m server config show "$@" ;;
  "bench serve"*) ;;
  bench*|plan*) exec {python} -c '{parse}' "$@" ;;
esac
exec {python} -m server "$@"
"""
PARSE = """
import importlib, sys
from server.cli import Parser
given = sys.argv[1:] if sys.argv[1] == "plan" else [sys.argv[1] + "." + sys.argv[2], *sys.argv[3:]]
parser = Parser(prog=given[0])
importlib.import_module("server." + given[0]).add_arguments(parser)
parser.parse_args(given[1:])
"""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    @property
    def skipped(self) -> bool:
        first = next((line for line in self.text.splitlines() if line and not line.startswith("#")), "")
        return any(first == word or first.startswith(word + " ") for word in NOT_RUN)


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: found.start()].count("\n") + 1
            yield Block(str(page.relative_to(ROOT)), line, found[1], found[2])


RUN = [block for block in blocks() if not block.skipped]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving("--num-kv-blocks", "512") as running:
        yield running


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what the documents name, an `octavo` on the path, and a curl that fails on an error."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("configs", "docker"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    script = folder / "bin" / "octavo"
    script.parent.mkdir()
    script.write_text(OCTAVO.format(root=ROOT, python=sys.executable, parse=PARSE))
    script.chmod(0o755)
    return folder


def test_there_is_something_to_run() -> None:
    assert len(RUN) > 10
    assert {block.page for block in RUN} >= {"README.md", "docs/operations.md", "docs/tuning.md", "docs/api.md"}


@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.page}:{block.line}")
def test_the_example_runs(block: Block, server: Server, place: Path) -> None:
    text = block.text.replace(HERE, f"127.0.0.1:{server.port}")
    text = text.replace("octavo bench serve ", f"octavo bench serve --base-url {server.url} --warmup 0 --output-len 8 ")
    program = ["bash", "-euo", "pipefail", "-c", text]
    if block.language == "python":
        program = [sys.executable, "-c", text]
    python = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{place}/bin:{python}:{os.environ['PATH']}", "CURL_HOME": str(place)}
    done = subprocess.run(
        program, cwd=place, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:engine|server|csrc|docker|configs|tests|docs)/[\w./-]+)`", page.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_of_serve_exist(page: Path) -> None:
    """In a table of a migration page our flag stands in the second column, elsewhere wherever a flag is quoted."""
    text = page.read_text()
    if page.name.startswith("migrate"):
        rows = re.findall(r"^\|[^|\n]*\|([^|\n]*)\|", text, re.MULTILINE)
        flags = {flag for cell in rows for flag in re.findall(r"(--[a-z][a-z0-9-]+)", cell)}
    else:
        flags = {
            flag for line in re.findall(r"octavo serve[^\n`]*", text) for flag in re.findall(r" (--[a-z-]+)", line)
        }
    known = {option.flag for option in OPTIONS.values()} | {"--config", "--help-all", "--no-auth"}
    known |= {"--no-" + option.flag.removeprefix("--") for option in OPTIONS.values() if option.kind == "bool"}
    assert flags <= known, flags - known


# ---------------------------------------------------------------- docs/api.md


def sections() -> dict[str, str]:
    text = (ROOT / "docs" / "api.md").read_text()
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def fields(section: str) -> dict[str, str]:
    """Field -> what the table says of it."""
    rows = re.findall(r"^\| (`[^|]*) \|(.*)\|$", section, re.MULTILINE)
    return {name: text for cell, text in rows for name in re.findall(r"`(\w+)`", cell)}


def test_the_api_page_has_every_route() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert [f"{r.method} {r.path}" for r in ROUTES if f"`{r.method} {r.path}`" not in text] == []


@pytest.mark.parametrize("route", [r for r in ROUTES if r.body is not None], ids=lambda r: r.path)
def test_the_api_page_has_every_field_of_a_body(route: object) -> None:
    listed = sections()
    own = fields(listed[f"{route.method} {route.path}"])  # type: ignore[attr-defined]
    if route.path in ("/v1/chat/completions", "/v1/completions"):  # type: ignore[attr-defined]
        own |= fields(listed["Fields of chat and completions"])
    known = {field.encode_name for field in msgspec.structs.fields(route.body)}  # type: ignore[attr-defined]
    assert set(own) == known


def test_fields_without_effect_are_said_to_have_none() -> None:
    listed = sections()
    said = {**fields(listed["Fields of chat and completions"]), **fields(listed["POST /v1/chat/completions"])}
    without = {name for name, text in said.items() if "no effect" in text}
    assert without == HOSTED_ONLY & set(said)


def test_the_list_of_refused_fields_is_the_servers() -> None:
    assert set(re.findall(r"`(\w+)`", sections()["Refused by name"])) == set(REFUSED)
