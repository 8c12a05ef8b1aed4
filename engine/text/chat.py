"""Chat messages to prompt text: the model's own template in jinja's sandbox, bounded in time and size.

A template is a part of the model directory, written by whoever published the model, so it gets neither
attributes of Python objects nor the chance to hang a server.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ConfigError, InvalidRequest
from engine.text.tokenizer import Tokenizer

RENDER_TIMEOUT_S = 2.0
MAX_OUTPUT_CHARS = 16 << 20  # of the prompt, and of any one value
MAX_WRITTEN_CHARS = 4 * MAX_OUTPUT_CHARS  # by all outputs, those that are caught in macros and blocks too
MAX_MADE_BYTES = 512 << 20  # of all values together, whether or not they are still alive

_CONTINUE_MARK = "\ue0c7\ue0c8\ue0c9"  # private-use characters: no message holds them, no template trims them
_GROWING_FILTERS = ("center", "format", "indent", "join", "replace", "tojson", "wordwrap")
_PADDING_FILTERS = ("batch", "slice")  # make as many entries as they are told
_PROVIDED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """Renders chats for one model.

    `template` = None renders plainly ("role: content" lines), for models that were published without a template.
    """

    def __init__(
        self,
        template: str | None,
        *,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._special_tokens = dict(special_tokens or {})
        self._environment = _BoundedEnvironment()
        self._template, self._variables = self._compile(template)
        self._tool_template, tool_variables = self._compile(tool_template)
        self.supports_tools = tool_template is not None or "tools" in self._variables
        self._variables |= tool_variables

    @classmethod
    def of(cls, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """The template that came with `tokenizer`, or `override` (an operator's choice, never a request's)."""
        templates = tokenizer.chat_templates
        if override is not None:
            return cls(override, special_tokens=tokenizer.special_tokens)
        return cls(
            templates.get("default"), tool_template=templates.get("tool_use"), special_tokens=tokenizer.special_tokens
        )

    def _compile(self, source: str | None) -> tuple[jinja2.Template | None, frozenset[str]]:
        if source is None:
            return None, frozenset()
        try:
            names = TrackingCodeGenerator(self._environment)
            names.optimizer = None
            names.visit(self._environment.parse(source))
            return self._environment.from_string(source), frozenset(names.undeclared_identifiers)
        except Exception as error:  # not only TemplateError: a `break` outside of a loop is Python's SyntaxError
            raise ConfigError(f"the chat template of this model can't be compiled: {error}") from error

    def template_variables(self) -> frozenset[str]:
        """The switches this template knows (such as `enable_thinking`): names that `render` takes as keywords."""
        return self._variables - _PROVIDED - self._environment.globals.keys() - self._special_tokens.keys()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Prompt text of a chat, special tokens included: encode it with `add_special_tokens=False`.

        `messages` and `tools` are in OpenAI's form. `continue_final_message` leaves the last message open, so
        that the model goes on with it. Other keywords go to the template. Raises InvalidRequest when the
        template refuses the messages, or takes too long over them.
        """
        chat = [_plain_message(message) for message in messages]
        if continue_final_message:
            if not chat or not isinstance(chat[-1].get("content"), str):
                raise InvalidRequest("continue_final_message needs a last message with text", param="messages")
            chat[-1]["content"] += _CONTINUE_MARK + " "
            add_generation_prompt = False
        if tools and not self.supports_tools:
            chat = _tools_as_text(chat, tools)
        template = self._tool_template if tools and self._tool_template else self._template
        if template is None:
            text = _render_plainly(chat, add_generation_prompt)
        else:
            text = self._render_template(
                template,
                messages=chat,
                tools=list(tools) if tools else None,
                documents=kwargs.pop("documents", None),
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | kwargs),
            )
        if continue_final_message:
            text, mark, rest = text.rpartition(_CONTINUE_MARK)
            if not mark:
                raise InvalidRequest("the chat template drops the last message; it can't be continued")
            if not rest.startswith(" "):  # the template trims messages: the model knows no space here
                text = text.rstrip()
        return text

    def _render_template(self, template: jinja2.Template, **variables: Any) -> str:
        pieces: list[str] = []
        size = 0
        try:
            with self._environment.bounds(RENDER_TIMEOUT_S):
                for piece in template.generate(**variables):
                    size += len(piece)
                    if size > MAX_OUTPUT_CHARS:
                        raise _OutOfBounds(f"the rendered chat exceeds {MAX_OUTPUT_CHARS} characters")
                    pieces.append(piece)
        except RecursionError as error:
            raise InvalidRequest(
                "the chat template recurses too deeply over these messages", param="messages"
            ) from error
        except _OutOfBounds as error:
            raise InvalidRequest(str(error), param="messages") from error
        except Exception as error:  # a template is a program: it can fail in any way over what it is given
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        return "".join(pieces)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text parts joined, absent fields left out, call arguments as objects."""
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    content = plain.get("content") or ""
    if isinstance(content, (list, tuple)):
        content = "\n".join(str(part.get("text", part.get("refusal", ""))) for part in content)
    plain["content"] = content
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", {}))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # what is no JSON is shown to the model as it was written
            function["arguments"] = json.loads(arguments or "{}")
    return {**call, "function": function}


def _tools_as_text(chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools for a template that knows none, in the Hermes form: the most widely trained one."""
    listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    intro = (
        "You may call functions to answer. Available functions, as JSON schemas:\n"
        f"<tools>\n{listing}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON inside of these tags:\n"
        '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
    )
    texts: list[dict[str, Any]] = []
    for message in chat:
        content = message["content"]
        if message["role"] == "tool":
            texts.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
            continue
        calls = [
            f"<tool_call>\n{json.dumps(_name_and_arguments(call), ensure_ascii=False)}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        texts.append(rest | {"content": "\n".join([content, *calls] if content else calls) if calls else content})
    if texts and texts[0]["role"] in ("system", "developer"):
        texts[0] = texts[0] | {"content": f"{texts[0]['content']}\n\n{intro}"}
    else:
        texts.insert(0, {"role": "system", "content": intro})
    return texts


def _name_and_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function.get("name", ""), "arguments": function.get("arguments", {})}


def _render_plainly(chat: Iterable[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    lines = [f"{message['role']}: {message['content']}" for message in chat]
    if add_generation_prompt:
        lines.append("assistant:")
        return "\n".join(lines)
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the sandbox


class _OutOfBounds(Exception):
    """The template took more time or memory than it may."""


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; for serving it is just its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict(...)` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(*args, **kwargs)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with the names that published chat templates use, where every loop and macro watches the clock.

    The bounds are woven into the parsed template: each loop iterates over `watched(...)`, each macro starts with
    a look at the clock, each output is counted, and what operators, slices, calls and filters make is limited in
    size, each value and all together.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            optimized=False,  # its folding of constants takes the cube of an expression's depth
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        del self.globals["lipsum"]  # text for placeholders, as much as is asked for
        for name, filter in self.filters.items():
            self.filters[name] = self._bounded_filter(name, filter)
        self._local = threading.local()

    @contextlib.contextmanager
    def bounds(self, seconds: float) -> Iterator[None]:
        """What this thread's templates may use until its end."""
        self._local.bounds = _Bounds(time.monotonic() + seconds)
        try:
            yield
        finally:
            del self._local.bounds

    @property
    def _bounds(self) -> _Bounds:
        return getattr(self._local, "bounds", None) or _Bounds(float("inf"))  # constants, while it is compiled

    def check_clock(self) -> str:
        if time.monotonic() > self._bounds.deadline:
            raise _OutOfBounds(f"the chat template took more than {RENDER_TIMEOUT_S:g} s over these messages")
        return ""

    def written(self, value: Any, constant: int) -> str:
        """The text of one output, and `constant` characters beside it."""
        text = str(value)
        bounds = self._bounds
        bounds.written += len(text) + constant
        if bounds.written > MAX_WRITTEN_CHARS:
            raise _OutOfBounds(f"the chat template writes more than {MAX_WRITTEN_CHARS} characters")
        return text

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        return self._bounded(value) if isinstance(argument, slice) else value

    def watched(self, iterable: Any) -> Iterator[Any]:
        for item in iterable:
            self.check_clock()
            yield item

    def concat_bounded(self, *parts: Any) -> str:
        return str(self._bounded("".join([str(part) for part in parts])))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "*" and not _is_small_product(left, right)):
            raise SecurityError(f"operator {operator} on these values is not allowed in a chat template")
        if operator == "%" and isinstance(left, str):
            self._check_growth("%", left, [right])
        return self._bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check_clock()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            __self._check_growth(method.__name__, text, [*args, *kwargs.values()])
        return __self._bounded(super().call(__context, __obj, *args, **kwargs))

    def _bounded_filter(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """The filter `name`, refused where its result may be too large."""

        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.check_clock()
            given = [arg for arg in args if not isinstance(arg, (jinja2.Environment, jinja2.nodes.EvalContext))]
            given = given[1:] if given and isinstance(given[0], jinja2.runtime.Context) else given
            if name in _GROWING_FILTERS:
                text = given[0] if name != "join" else (given[1] if len(given) > 1 else kwargs.get("d", ""))
                others = given[1:] if name != "join" else given[:1]
                self._check_growth(name, text if isinstance(text, str) else str(text), [*others, *kwargs.values()])
            elif name in _PADDING_FILTERS:
                self._check_growth(name, "", [arg * 100 for arg in [*given, *kwargs.values()] if isinstance(arg, int)])
            value = filter(*args, **kwargs)
            return self.watched(value) if isinstance(value, Iterator) else self._bounded(value)

        return functools.update_wrapper(bounded, filter)

    def _check_growth(self, name: str, text: str, args: Sequence[Any]) -> None:
        """Refuse, before it is computed, a method of `text` whose result may exceed MAX_OUTPUT_CHARS."""
        numbers = [abs(arg) for arg in args if isinstance(arg, int)]
        widest = max([_extent(arg) for arg in args], default=0)
        size = max(numbers, default=0)
        if name in ("replace", "join", "expandtabs", "indent", "wordwrap", "translate"):
            size = (len(text) + 1) * max(size, widest, 1)
        elif name in ("format", "format_map", "%"):
            widths = [int(digits) for digits in re.findall(r"\d+", text)]
            size = max([size, *widths, widest * (text.count("{") + text.count("%"))])
        if size > MAX_OUTPUT_CHARS:
            raise _OutOfBounds(f"the chat template makes a value of more than {MAX_OUTPUT_CHARS} characters")

    def _bounded(self, value: Any) -> Any:
        if _extent(value) > MAX_OUTPUT_CHARS:
            raise _OutOfBounds(f"the chat template makes a value of more than {MAX_OUTPUT_CHARS} characters")
        bounds = self._bounds
        bounds.made += _bytes_of(value)
        if bounds.made > MAX_MADE_BYTES:
            raise _OutOfBounds(f"the chat template makes values of more than {MAX_MADE_BYTES >> 20} MiB together")
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _environment_call("watched", [loop.iter])  # type: ignore[list-item]
        for macro in template.find_all(nodes.Macro):
            macro.body.insert(0, nodes.Output([_environment_call("check_clock", [])]))
        return _BoundTexts().visit(template)  # type: ignore[no-any-return]


class _BoundTexts(jinja2.visitor.NodeTransformer):
    """Replaces `a ~ b` by a call that limits the result, and counts what is written."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        constants = [part for part in node.nodes if isinstance(part, nodes.TemplateData)]
        size = sum([len(part.data) for part in constants])
        for i, part in enumerate(node.nodes):
            if not isinstance(part, nodes.TemplateData):
                node.nodes[i] = _environment_call("written", [part, nodes.Const(size)])
                size = 0
        if size:
            node.nodes.append(_environment_call("written", [nodes.Const(""), nodes.Const(size)]))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("concat_bounded", node.nodes)


def _environment_call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


@dataclass(slots=True)
class _Bounds:
    """What one rendering may still do."""

    deadline: float  # by the monotonic clock
    written: int = 0
    made: int = 0


def _bytes_of(value: Any) -> int:
    """Memory of a text, or of a list and the texts in it."""
    if isinstance(value, str):
        return sys.getsizeof(value)
    if isinstance(value, (list, tuple)):
        return sys.getsizeof(value) + sum([sys.getsizeof(entry) for entry in value if isinstance(entry, str)])
    return 0


def _extent(value: Any) -> int:
    """Characters of a text; entries of a list, and the characters of those that are texts."""
    if isinstance(value, (list, tuple)):
        return len(value) + sum([len(entry) for entry in value if isinstance(entry, str)])
    return len(value) if isinstance(value, str) else 0


def _is_small_product(left: Any, right: Any) -> bool:
    numbers = [value for value in (left, right) if isinstance(value, (int, float))]
    sized = [_extent(value) for value in (left, right) if isinstance(value, (str, list, tuple))]
    return all(abs(number) < 1e18 for number in numbers) and (
        not sized or max(sized) * max([abs(number) for number in numbers], default=1) <= MAX_OUTPUT_CHARS
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
