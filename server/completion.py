"""Completion scripts for shells, made from the parser itself, so that they can't miss a flag."""

from __future__ import annotations

import argparse

from engine.config import OPTIONS

BASH = """\
_octavo() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{commands}" ;;
  esac
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ ${{#COMPREPLY[@]}} -eq 0 ] && COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _octavo octavo"""


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for bash, zsh or fish."""
    commands = _commands(parser)
    if shell == "fish":
        return _fish(commands)
    cases = "\n".join(
        f'    {name}) words="{" ".join([*_values(sub), *_flags(sub)])}" ;;' for name, sub in commands.items()
    )
    values = "\n".join(f'    {flag}) words="{" ".join(choices)}" ;;' for flag, choices in _choices().items())
    body = BASH.format(cases=cases, values=values, commands=" ".join(commands))
    return f"autoload -U +X bashcompinit && bashcompinit\n{body}" if shell == "zsh" else body


def _fish(commands: dict[str, argparse.ArgumentParser]) -> str:
    known = _choices()
    lines = ["complete -c octavo -n __fish_use_subcommand -f -a '" + " ".join(commands) + "'"]
    for name, sub in commands.items():
        when = f"complete -c octavo -n '__fish_seen_subcommand_from {name}'"
        for flag in _flags(sub):
            takes = f" -x -a '{' '.join(known[flag])}'" if flag in known else ""
            lines.append(f"{when} -l {flag.removeprefix('--')}{takes}")
        if values := _values(sub):
            lines.append(f"{when} -f -a '{' '.join(values)}'")
    return "\n".join(lines)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _choices() -> dict[str, tuple[str, ...]]:
    """What a flag of the settings takes, where that is a list."""
    return {option.flag: option.choices for option in OPTIONS.values() if option.choices}


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def _values(parser: argparse.ArgumentParser) -> list[str]:
    return [str(c) for action in parser._actions if not action.option_strings for c in action.choices or ()]
