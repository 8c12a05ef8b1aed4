"""Rendered chats against transformers, and what a hostile template can't do."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, InvalidRequest
from engine.text import chat
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
USER = {"role": "user", "content": "What's <b>2 & 2</b>?"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "  Sure?  \n"}],
    [USER, {"role": "assistant", "content": "It is "}],
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"ä": {}}}}}]

# Forms that published templates use: whitespace control, namespaces, macros, loop controls, filters, tests.
TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    """{%- set ns = namespace(last=-1) -%}
    {%- for m in messages -%}
        {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
    {%- endfor -%}
{{ bos_token }}{{ ns.last }}
    {% for m in messages %}
  {% if loop.first and m.role == 'system' %}{% continue %}{% endif %}
[{{ loop.index }}/{{ loop.length }}] {{ m.role ~ ': ' ~ m.content }}{{ ', ' if not loop.last }}
    {% endfor %}
{% if add_generation_prompt %}{{ '>' * 3 }}{% endif %}""",
    """{% macro show(x) %}<{{ x | tojson }}>{% endmacro %}
{% for m in messages %}{{ show(m) }}{% generation %}{{ m.content.split('?')[0].strip() }}{% endgeneration %}{% endfor %}
{% if tools is not none %}{{ tools | tojson(indent=4) }}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}
{{ (messages | map(attribute='role') | list)[:1] }}{{ messages[0] is mapping }}{{ dict(a=1).items() | list }}""",
]


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompted", [False, True])
def test_the_default_model_renders_as_in_transformers(
    tokenizer: Tokenizer, theirs: Any, messages: list[dict[str, Any]], prompted: bool
) -> None:
    ours = ChatTemplate.of(tokenizer)
    text = ours.render(messages, add_generation_prompt=prompted)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=prompted, tokenize=False)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=prompted, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize(("template", "tools"), [*((source, None) for source in TEMPLATES), (TEMPLATES[2], TOOLS)])
def test_any_template_renders_as_in_transformers(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = ChatTemplate(template, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    expected, _ = render_jinja_template(
        [messages], tools, None, template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert ours.render(messages, tools) == expected[0]


@pytest.mark.parametrize("template", TEMPLATES[:2])
@pytest.mark.parametrize("content", ["The answer", "ends in a space ", "a\nb\n"])
def test_goes_on_with_the_last_message_as_transformers_does(template: str, content: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [USER, {"role": "assistant", "content": content}]
    ours = ChatTemplate(template, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    expected, _ = render_jinja_template(
        [messages], None, None, template, continue_final_message=True, bos_token="<s>", eos_token="</s>"
    )
    assert ours.render(messages, continue_final_message=True) == expected[0]


def test_messages_reach_the_template_in_the_form_it_expects() -> None:
    template = ChatTemplate("{{ messages | tojson }}{{ tools | tojson }}")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    text = template.render(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    )
    assert text == (
        '[{"role": "user", "content": "a\\nb"}, {"role": "assistant", "content": "", "tool_calls": '
        '[{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}]null'
    )
    assert template.supports_tools


def test_tools_become_text_where_the_template_knows_none(tokenizer: Tokenizer) -> None:
    template = ChatTemplate.of(tokenizer)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = template.render(
        [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4", "tool_call_id": "c"}],
        TOOLS,
    )
    assert not template.supports_tools
    assert '"name": "add"' in text.split("<|im_end|>")[0]
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\n4\n</tool_response>" in text


def test_the_template_for_tools_is_used_for_tools_only() -> None:
    template = ChatTemplate("plain", tool_template="with tools")
    assert template.render([USER]) == "plain"
    assert template.render([USER], TOOLS) == "with tools"


def test_renders_plainly_without_a_template() -> None:
    template = ChatTemplate(None)
    assert template.render([{"role": "user", "content": "hi"}]) == "user: hi\nassistant:"
    open_end = template.render([USER, {"role": "assistant", "content": "So"}], continue_final_message=True)
    assert open_end.endswith("\nassistant: So")


def test_lists_the_switches_of_a_template() -> None:
    source = "{% if enable_thinking %}{{ bos_token }}{{ messages[0].content }}{{ date | default('') }}{% endif %}"
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    assert template.template_variables() == {"enable_thinking", "date"}
    assert template.render([USER], enable_thinking=True, date="1 May") == f"<s>{USER['content']}1 May"


HOSTILE = {
    "endless loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "doubling macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a large product": "{{ ('a' * 10000) * 100000 }}",
    "a large power": "{{ 9 ** 9 ** 9 }}",
    "doubling sums": "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling joins": "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a wide field": "{{ 'a'.ljust(999999999) }}",
    "a wide format": "{{ '{:>999999999}'.format(1) }}",
    "a wide percent": "{{ '%0999999999d' % 1 }}",
    "a wide filter": "{{ 'a'|center(999999999) }}",
    "a replacement": "{{ ('a' * 99999).replace('a', 'a' * 99999) }}",
    "a join": "{{ ('a' * 99999)|join('a' * 99999) }}",
    "a list of the same": "{% set x = 'a' * 9999999 %}{{ ([x] * 9999)|join }}",
    "an indent": "{{ messages|tojson(indent=999999999) }}",
    "a padded batch": "{{ [1]|batch(99999999, 'x')|list|length }}",
    "many slices": "{{ []|slice(99999999)|list|length }}",
    "large values in a chain": "{% set n = namespace(x=0) %}{% for i in range(99999) %}"
    "{% set n.x = [n.x, 'a' * 9999999 ~ i] %}{% endfor %}",
    "slices in a chain": "{% set b = 'a' * 9999999 %}{% set n = namespace(x=0) %}{% for i in range(99999) %}"
    "{% set n.x = [n.x, b[1:]] %}{% endfor %}",
    "a caught output": "{% set b = 'a' * 9999999 %}{% set x %}{% for i in range(999) %}{{ b }}{% endfor %}{% endset %}",
    "a macro's output": "{% set b = 'a' * 9999999 %}{% macro m() %}{% for i in range(999) %}{{ b }}{% endfor %}"
    "{% endmacro %}{{ m()|length }}",
    "caught constants": "{% set x %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
    "escapes of escapes": "{% set x = '<' * 2000000 %}{{ x" + "|forceescape" * 99 + "|length }}",
    "quotes of quotes": "{% set x = '<' * 2000000 %}{{ x" + "|urlencode" * 99 + "|length }}",
    "placeholder text": "{{ lipsum(99999999) }}",
    "large output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "a look behind": "{{ messages[0].__class__.__mro__[1].__subclasses__() }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "its own refusal": "{{ raise_exception('roles must alternate') }}",
    "a missing field": "{{ messages[0].content.missing.field }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_template_that_fails_or_goes_too_far_is_an_invalid_request(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "RENDER_TIMEOUT_S", 0.3)
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.param == "messages"
    assert source not in str(caught.value)


@pytest.mark.parametrize("deep", ["{{ x" + "|urlencode" * 90 + " }}", "{{ x" + "[0]" * 90 + " }}"])
def test_a_deep_expression_is_compiled_in_a_time_that_follows_its_length(deep: str) -> None:
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        ChatTemplate(deep)
    finally:
        sys.setprofile(None)
    assert calls < 200_000


def test_no_hostile_template_takes_much_memory() -> None:
    code = """
import resource
from engine.errors import InvalidRequest
from engine.text import chat
from tests.text.test_chat import HOSTILE, USER
chat.RENDER_TIMEOUT_S = 0.4
resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
for source in HOSTILE.values():
    try:
        chat.ChatTemplate(source).render([USER])
    except InvalidRequest as error:
        assert not isinstance(error.__cause__, MemoryError), source
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_template_that_cannot_be_compiled_is_a_config_error() -> None:
    for source in ("{% for %}", "{% break %}", "{{ 'a'|nothing }}"):
        with pytest.raises(ConfigError, match="can't be compiled"):
            ChatTemplate(source)


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": None}]])
def test_cannot_go_on_with_a_message_that_is_not_there(messages: list[dict[str, Any]]) -> None:
    if not messages:
        with pytest.raises(InvalidRequest, match="continue_final_message"):
            ChatTemplate("x").render(messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="drops the last message"):
        ChatTemplate("x").render([USER], continue_final_message=True)
