"""The command line as a user meets it: help that fits a screen, errors of one line, completion for every flag."""

from __future__ import annotations

import subprocess

import pytest

from engine.config import OPTIONS
from server.cli import BENCHES, main


def output(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    try:
        status = main(args)
    except SystemExit as done:  # argparse's own way out of --help
        status = int(done.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_fits_a_screen_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = output(capsys, "--help")
    assert status == 0
    assert 24 <= len(text.splitlines()) <= 50
    assert "examples:" in text


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys)[1] == output(capsys, "--help")[1]


@pytest.mark.parametrize("command", ["serve", "pull", "chat", "config", "doctor", "plan", "completion", "bench"])
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, text, _ = output(capsys, command, "--help")
    assert status == 0
    assert text.startswith("usage: octavo")


def test_every_benchmark_that_is_listed_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [line.split()[0] for line in output(capsys, "bench")[1].splitlines() if line.startswith("  ")]
    assert set(listed) <= set(BENCHES)
    for name in listed:
        assert output(capsys, "bench", name, "--help")[0] == 0, name


def test_help_all_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "serve", "--help-all")[1]
    assert [o.flag for o in OPTIONS.values() if o.name != "model" and o.flag not in text] == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("serv",), "serv: not understood here; did you mean serve?"),
        (("serve", "--prot", "9"), "--prot: no such flag; did you mean --port?"),
        (("bench", "serv"), "bench serv: no such benchmark among"),
        (("completion", "bsh"), "did you mean bash?"),
        (("config", "show", "--port", "99999"), "--port 99999: must be a whole number from 0 to 65535"),
    ],
)
def test_a_slip_is_one_line_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], said: str
) -> None:
    status, _, error = output(capsys, *args)
    assert status == 2
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_flag(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    text = output(capsys, "completion", shell)[1]
    flags = [o.flag.removeprefix("--") for o in OPTIONS.values() if o.name != "model"]
    assert [flag for flag in flags if flag not in text] == []
    assert " ".join(BENCHES) in text


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["se"], ["serve"]),
        (["serve", "--kv-m"], ["--kv-memory", "--kv-manager"]),
        (["serve", "--preemption", "re"], ["recompute"]),
        (["bench", "ker"], ["kernels"]),
        (["config", "sh"], ["show"]),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], typed: list[str], offered: list[str]) -> None:
    script = output(capsys, "completion", "bash")[1]
    ask = f'COMP_WORDS=(octavo {" ".join(typed)}); COMP_CWORD={len(typed)}; _octavo; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "--norc", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered
