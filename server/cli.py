"""`octavo`: the command line. What a command needs is imported when it runs, so that help and errors are instant."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from engine import config
from engine.errors import ConfigError, OctavoError

EPILOG = """\
examples:
  octavo serve                          serve the default model on http://127.0.0.1:8000
  octavo serve ./model --port 9000      serve a model directory or GGUF file
  octavo chat                           talk to the default model in the terminal
  octavo chat --url http://host:8000    talk to a running server
  octavo bench serve --help             measure a running server
  octavo config show --port 9000        every setting, its value, and where that came from
  octavo doctor                         what this machine can do, and what would be chosen
  source <(octavo completion bash)      complete commands and flags in this shell

`octavo COMMAND --help` tells more of a command.
"""
SERVE_EPILOG = """\
examples:
  octavo serve ./Llama-3.2-1B --max-model-len 8192 --kv-memory 4GiB
  octavo serve --config configs/throughput.toml --port 9000
  OCTAVO_PORT=9000 octavo serve         every flag is also OCTAVO_NAME and a key of the TOML file
all flags: octavo serve --help-all
"""
CHAT_EPILOG = """\
examples:
  octavo chat --system 'Answer in one sentence.'
  octavo chat ./Llama-3.2-1B --temperature 0
  octavo chat --url http://127.0.0.1:8000 --api-key KEY
  echo 'What is the capital of France?' | octavo chat --temperature 0
all flags: octavo serve --help-all
"""
BENCHES = ("serve", "steps", "kernels", "memory", "paper", "quality", "gpu")
ALL_GROUPS = tuple(config.GROUPS)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, with the nearest flag where one was mistyped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": Formatter, "allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message):
            known = re.findall(r"'(.*?)'", found[2])
            near = difflib.get_close_matches(found[1], known, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            message = f"{found[1]}: not understood here; {hint}"
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what isn't known."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise ConfigError(self._unknown(unknown[0], found))
        return found

    def _unknown(self, given: str, found: argparse.Namespace) -> str:
        parser = getattr(found, "parser", self)
        name = given.split("=", 1)[0]
        if not name.startswith("-"):
            return f"{name}: not understood here (see {parser.prog} --help)"
        flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        near = difflib.get_close_matches(name, flags, 1, 0.5)
        return f"{name}: no such flag" + (f"; did you mean {near[0]}?" if near else f" (see {parser.prog} --help)")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples as they are and gives flags room."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(_width(), 120))
        self._action_max_length = 14  # room for every command: argparse forgets that they are indented


@dataclass(frozen=True)
class Command:
    """A command with flags of its own."""

    name: str
    about: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    usage: str | None = None
    epilog: str | None = None


class HelpAll(argparse.Action):
    """`--help-all`: the help with every flag in it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        everything = Parser(prog=parser.prog, description=parser.description, epilog=parser.epilog)
        config.add_options(everything, ALL_GROUPS, everything=True)
        everything.print_help()
        parser.exit(0)


def _width() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 100


def parser() -> Parser:
    """The whole grammar of the command line."""
    top = Parser(prog="octavo", description="Serve language models over an OpenAI-compatible API.", epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"octavo {program_version()}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        about = command.about[0].upper() + command.about[1:] + "."
        sub = commands.add_parser(
            command.name, help=command.about, description=about, usage=command.usage, epilog=command.epilog
        )
        sub.set_defaults(run=command.run, parser=sub)
        command.add_arguments(sub)
    # Only for the list and for completion: `main` hands these to their own modules.
    bench = commands.add_parser("bench", help="measure a server, steps, kernels (octavo bench NAME --help)")
    bench.add_argument("name", choices=BENCHES)
    commands.add_parser("plan", help="plan capacity with the real scheduler on a virtual clock")
    return top


def _serve_arguments(sub: argparse.ArgumentParser) -> None:
    config.add_options(sub, ALL_GROUPS, everything=False)
    sub.add_argument("--help-all", action=HelpAll, nargs=0, help="show every flag")


def _pull_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", default="smollm2", help="name, path or hub id [smollm2]")
    sub.add_argument("--revision", default="", metavar="REV", help="branch, tag or commit of a hub model")


def _chat_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--url", default="", help="a server to talk to, e.g. http://127.0.0.1:8000")
    sub.add_argument("--api-key", dest="client_key", default="", metavar="KEY", help="the key that the server wants")
    sub.add_argument("--system", default="", metavar="TEXT", help="system message")
    sub.add_argument("--temperature", type=float, default=0.7, metavar="N", help="0 = always the likeliest [0.7]")
    sub.add_argument("--max-tokens", type=int, default=512, metavar="N", help="length of an answer at most [512]")
    config.add_options(sub, config.ENGINE_GROUPS, everything=False)


def _config_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("action", nargs="?", choices=("show",), default="show", help="show")
    sub.add_argument("--json", action="store_true", help="as JSON")
    _serve_arguments(sub)


def _doctor_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="as JSON")
    config.add_options(sub, config.ENGINE_GROUPS, everything=False)


def _completion_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("shell", choices=("bash", "zsh", "fish"))


def program_version() -> str:
    """The installed version; a source tree that isn't installed has none."""
    try:
        return version("octavo")
    except PackageNotFoundError:
        return "0+source"


def run_serve(args: argparse.Namespace) -> int:
    from server.serve import serve

    return serve(config.load(args, os.environ), program_version())


def run_pull(args: argparse.Namespace) -> int:
    from engine.build import find_model

    print(find_model(config.EngineConfig.of(args.model, revision=args.revision), progress=True))
    return 0


def run_chat(args: argparse.Namespace) -> int:
    from server.chat_terminal import chat_with_model, chat_with_server

    if args.url:
        return chat_with_server(args)
    return chat_with_model(args, config.load(args, os.environ).engine)


def run_config(args: argparse.Namespace) -> int:
    settings = config.load(args, os.environ)
    rows = {
        name: {"value": _shown(option, settings.value(name)), "source": settings.sources[name], "group": option.group}
        for name, option in config.OPTIONS.items()
    }
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    group = ""
    for name, row in rows.items():
        if row["group"] != group:
            group = row["group"]
            print(f"[{group}]")
        key = name.replace("_", "-")
        if row["value"] is None or config.OPTIONS[name].secret:
            print(f"# {key}: {'not set' if not row['value'] else 'set, and not shown'} ({row['source']})")
        else:
            print(f"{key} = {json.dumps(row['value'], ensure_ascii=False)}  # {row['source']}")
    return 0


def _shown(option: config.Option, value: Any) -> Any:
    if option.secret:
        return ["***"] * len(value)
    return list(value) if isinstance(value, tuple) else value


def run_doctor(args: argparse.Namespace) -> int:
    from engine.build import examine

    findings = examine(config.load(args, os.environ).engine)
    if args.json:
        print(json.dumps(dict(findings), indent=2))
    else:
        width = max(len(name) for name, _ in findings)
        for name, text in findings:
            print(f"{name:<{width}}  {text}")
    return 0


def run_module(command: str, rest: Sequence[str]) -> int:
    """`octavo bench NAME ...` and `octavo plan ...`: modules with `add_arguments(parser)` and `main(args)`."""
    name = "server.plan"
    if command == "bench":
        chosen = rest[0] if rest else "--help"
        if chosen in ("-h", "--help"):
            print("usage: octavo bench NAME ...\n")
            for bench in BENCHES:
                about = importlib.import_module(f"server.bench.{bench}").__doc__ or ""
                print(f"  {bench:<8}  {about.split(chr(10))[0].split(': ', 1)[-1]}")
            print("\nEach has its own --help.")
            return 0
        if chosen not in BENCHES:
            near = difflib.get_close_matches(chosen, BENCHES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"bench {chosen}: no such benchmark among {', '.join(BENCHES)}{hint}")
        name, rest, command = f"server.bench.{chosen}", rest[1:], f"bench {chosen}"
    module = importlib.import_module(name)
    sub = Parser(prog=f"octavo {command}", description=(module.__doc__ or "").split("\n\n")[0])
    module.add_arguments(sub)
    return int(module.main(sub.parse_args(rest)))


def run_completion(args: argparse.Namespace) -> int:
    from server.completion import script

    print(script(args.shell, parser()))
    return 0


COMMANDS = (
    Command(
        "serve",
        "serve a model over HTTP",
        run_serve,
        _serve_arguments,
        usage="octavo serve [MODEL] [FLAGS]",
        epilog=SERVE_EPILOG,
    ),
    Command("pull", "fetch a model, convert it if need be, and say where it is", run_pull, _pull_arguments),
    Command(
        "chat",
        "talk to a model in the terminal, in this process or on a server",
        run_chat,
        _chat_arguments,
        usage="octavo chat [MODEL] [FLAGS]",
        epilog=CHAT_EPILOG,
    ),
    Command(
        "config",
        "show the resolved settings and where each comes from",
        run_config,
        _config_arguments,
        usage="octavo config show [MODEL] [FLAGS OF SERVE]",
    ),
    Command(
        "doctor",
        "say what this machine can do, and what would be chosen and why",
        run_doctor,
        _doctor_arguments,
        usage="octavo doctor [MODEL] [FLAGS]",
    ),
    Command("completion", "print a completion script for your shell", run_completion, _completion_arguments),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. What the user can put right is one line on stderr and exit code 2."""
    try:
        given = list(sys.argv[1:] if argv is None else argv)
        if given and given[0] in ("bench", "plan"):
            return run_module(given[0], given[1:])
        if not given:
            parser().print_help()
            return 0
        args = parser().parse_args(given)
        return int(args.run(args))
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
