"""Finding and building the library: what is used, and what a user without a compiler is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from csrc import build
from engine import native
from engine.errors import ConfigError


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No packaged library and an empty cache folder, which is returned."""
    monkeypatch.setattr(native, "PACKAGED", tmp_path / "none.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octavo" / "kernels"


@pytest.fixture
def instant_build(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Builds write an empty file; their targets are returned."""
    built: list[Path] = []

    def write(out: Path) -> None:
        built.append(out)
        out.write_bytes(b"")

    monkeypatch.setattr(build, "build", write)
    return built


def test_an_up_to_date_packaged_library_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packaged = tmp_path / "kernels.so"
    packaged.write_bytes(b"")
    build.fingerprint_file(packaged).write_text(build.fingerprint())
    monkeypatch.setattr(native, "PACKAGED", packaged)
    assert native.library_path() == packaged


def test_a_packaged_library_of_older_sources_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stale = tmp_path / "stale.so"
    stale.write_bytes(b"")
    build.fingerprint_file(stale).write_text("of last week")
    monkeypatch.setattr(native, "PACKAGED", stale)
    assert native.library_path() == stale
    assert "stale.so is older than csrc/cpu" in caplog.text


def test_the_cache_is_built_once_and_keyed_by_compiler(
    monkeypatch: pytest.MonkeyPatch, nothing_built: Path, instant_build: list[Path]
) -> None:
    first = native.library_path()
    assert first.parent == nothing_built
    assert native.library_path() == first
    assert instant_build == [first]
    monkeypatch.setattr(build, "compiler_version", lambda: "another compiler 1.0")
    assert native.library_path() != first


@pytest.mark.usefixtures("nothing_built")
def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"no-such-compiler.*install g\+\+"):
        native.library_path()


def test_a_failed_compilation_shows_the_compilers_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'step.cpp:7: error: something is missing' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(build.BuildError, match="something is missing"):
        build.build(tmp_path / "out.so", cxx=str(broken))
    assert not (tmp_path / "out.so").exists()


def test_the_library_holds_every_set_of_its_machine_in_order() -> None:
    isas = native.load().isas
    assert isas == [name for name in build.instruction_sets() if name in isas]
    assert isas[0] in ("portable", "neon")
