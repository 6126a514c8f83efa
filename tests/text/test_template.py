"""Chat templates: what transformers would render, and nothing a hostile one could do."""

from __future__ import annotations

import json
import re
import time
import warnings

import pytest

from hunch.errors import RequestError, TemplateError
from hunch.text.template import render

USER = [{"role": "user", "content": "Hi <b>&"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is 2+2?\n"},
    {"role": "assistant", "content": "4", "tool_calls": None},
    {"role": "user", "content": "And 3+3? Ünïcode 你好"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
    }
]

# In the manner of the families' own templates.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nDefault.<|im_end|>\\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama 2": (
        "{%- if messages[0]['role'] == 'system' -%}{%- set loop_messages = messages[1:] -%}"
        "{%- set system_message = messages[0]['content'] -%}{%- else -%}"
        "{%- set loop_messages = messages -%}{%- set system_message = false -%}{%- endif -%}"
        "{%- for message in loop_messages -%}"
        "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('roles must alternate') }}{%- endif -%}"
        "{%- if loop.index0 == 0 and system_message is string -%}"
        "{%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n' + message.content -%}"
        "{%- else -%}{%- set content = message['content'] -%}{%- endif -%}"
        "{%- if message['role'] == 'user' -%}{{ bos_token ~ '[INST] ' ~ content | trim ~ ' [/I]' }}"
        "{%- elif message['role'] == 'assistant' -%}{{ ' ' + content.strip() + ' ' + eos_token }}"
        "{%- endif -%}{%- endfor -%}"
    ),
    "with tools": (
        "{%- set ns = namespace(first=true, names=[]) %}\n"
        "{%- if tools is defined and tools %}\n"
        "    {{- '# Tools\\n' }}\n"
        "    {%- for tool in tools %}\n"
        "        {{- tool | tojson }}\n        {{- '\\n' }}\n"
        "        {{- tool.function | tojson(indent=2) }}\n"
        "        {%- set ns.names = ns.names + [tool.function.name] %}\n"
        "    {%- endfor %}\n"
        "{%- endif %}\n"
        "{{- ns.names | join(', ') }}\n"
        "{%- macro show(m, depth=0) %}{{ m.role | upper }}: {{ m['content'] | default('none') }}\n"
        "{% endmacro %}\n"
        "{%- for message in messages if message.role != 'system' %}\n"
        "    {%- if loop.last %}{% continue %}{% endif %}\n"
        "    {{- show(message) }}\n"
        "    {%- for key, value in message.items() %}{{ key }}={{ value }};{% endfor %}\n"
        "    {%- generation %}{{ message.content.split('+')[-1] }}{% endgeneration %}\n"
        "{%- endfor %}\n"
        "{%- if enable_thinking is defined and enable_thinking is false %}no thinking{% endif %}\n"
        "{{- messages | map(attribute='role') | list | length }}"
        "{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join}}"
        "{{- ('a', 'b') | first }}{{ {'x': [1, 2]} | tojson }}{{ '%s-%d' % ('q', 3) }}"
        "{{- 'abc' | replace('b', 'x') | indent(2, true) }}{{ undefined_name }}"
    ),
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("messages", [USER, TALK], ids=["one", "four"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_transformers_renders_the_same(name: str, messages: list, tools: list | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils.chat_template_utils import render_jinja_template
    values = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": False}
    expected, _ = render_jinja_template(
        [messages], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, **values
    )
    assert render(messages, TEMPLATES[name], tools=tools, **values) == expected[0]


def test_no_generation_prompt() -> None:
    text = render(USER, TEMPLATES["chatml"], add_generation_prompt=False)
    assert text.endswith("Hi <b>&<|im_end|>\n")


def test_json_is_plain() -> None:
    value = {"b": "<é>", "a": [1, None]}
    assert render(USER, "{{ x | tojson }}", x=value) == json.dumps(value, ensure_ascii=False)
    assert render(USER, "{{ x | tojson(indent=1) }}", x=value) == json.dumps(
        value, ensure_ascii=False, indent=1
    )


def test_the_date() -> None:
    assert render(USER, "{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert render([message], "{{ messages[0].content }}") == "a\nb"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["text"],
        [{"content": "no role"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    ],
)
def test_messages_that_cannot_be(messages: list) -> None:
    with pytest.raises(RequestError):
        render(messages, TEMPLATES["chatml"])


@pytest.mark.parametrize("template", [None, ""])
def test_a_model_without_a_template(template: str | None) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        render(USER, template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", r"line 1"),
        ("{{ 'a", r"line 1"),
        ("{{ a.b.c }}", "'a' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[9].role }}", "no element 9"),
        ("{{ messages + 1 }}", "concatenate"),
        ("{{ raise_exception('roles!') }}", "roles!"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("{% include 'other' %}", "another template"),
        ("{% extends 'other' %}", "another template"),
    ],
)
def test_broken_templates(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(USER, template)


GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}STEP{% endfor %}{{ ns.x }}"


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


HOSTILE = {
    "reaches python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reaches globals": "{{ raise_exception.__globals__['os'].x }}",
    "reaches frames": "{{ (messages | map('upper')).gi_frame.f_globals.x }}",
    "changes messages": "{{ messages.append(1) }}",
    "changes a message": "{{ messages[0].update({'role': 'system'}) }}",
    "long range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "slow loop filter": "{% for a in range(9999) if range(99999) | list | sort == 1 %}{% endfor %}",
    "text times number": "{{ 'a' * 10**10 }}",
    "list times number": "{{ ([1] * 10**10) | length }}",
    "list of lists": "{{ ([[1] * 1000] * 10**6) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "doubled by +": grow("'aaaaaaaa'", "{% set ns.x = ns.x + ns.x %}"),
    "doubled by ~": grow("'aaaaaaaa'", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubled by a capture": grow("'aaaaaaaa'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "doubled by a list": grow("1", "{% set ns.x = [ns.x, ns.x] %}"),
    "doubled by a tuple": grow("1", "{% set ns.x = (ns.x, ns.x) %}"),
    "doubled by a dict": grow("1", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}"),
    "doubled by dict()": grow("1", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    "doubled by replace": grow("'aaaaaaaa'", "{% set ns.x = ns.x.replace('a', 'aa') %}"),
    "squared": grow("7", "{% set ns.x = ns.x * ns.x %}"),
    "replace": "{% set a = 'a' * 5000000 %}{{ a.replace('a', a) | length }}",
    "replace filter": "{% set a = 'a' * 5000000 %}{{ a | replace('a', a) | length }}",
    "join": "{% set a = 'a' * 400000 %}{{ a.join(a) | length }}",
    "join filter": "{% set a = 'a' * 400000 %}{{ a | join(a) | length }}",
    "lazy": "{{ range(99999) | map('replace', '1', '1' * 100000) | list | length }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width of a star": "{{ '%*d' % (1000000000, 1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format that grows": grow("'aaaaaaaa'", "{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    "format reaches python": "{{ '{0.__class__}'.format(1) }}",
    "format reaches an item": "{{ '{0[a]}'.format({'a': 1}) }}",
    "format of nothing": "{{ '{}{}'.format(1) }}",
    "format of a map": "{{ '{a}'.format_map({'a': 1}) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "date": "{{ strftime_now('%999999999Y') }}",
    "text in a loop": "{% for a in range(99999) %}" + "x" * 10000 + "{% endfor %}",
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro tree": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}"
    ),
    "block without end": "{% block a %}{{ self.a() }}{% endblock %}",
    "very long": "x" * 300_000,
    "very deep": "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
    "very deep blocks": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "no meter": "{% set hunch_tick = namespace %}{% for a in range(9) %}{% endfor %}",
    "many slow expressions": "{{ range(99999) | list | sort | length }}" * 1500,
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hunch.text.sandbox.MAX_SECONDS", 0.05)
    started = time.perf_counter()
    with pytest.raises(TemplateError):
        render(USER, HOSTILE[name])
    assert time.perf_counter() - started < 200  # seconds, on a busy machine; unbounded otherwise
    assert USER == [{"role": "user", "content": "Hi <b>&"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '%s=%d' | format('a', 3) }}", "a=3"),
        ("{{ '%(a)s' | format(a='b') }}", "b"),
        ("{{ '<think{}>'.format(':x') }}", "<think:x>"),
        ("{{ '{1}{0}{name}{{}}'.format('a', 'b', name='c') }}", "bac{}"),
        ("{{ '{} and {}'.format(1, 2) }}", "1 and 2"),
    ],
)
def test_texts_are_filled_in(template: str, text: str) -> None:
    assert render(USER, template) == text


def test_a_template_is_not_blamed_for_time_that_others_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hunch.text.sandbox.MAX_SECONDS", 0.2)

    def wait() -> str:  # as a thread does on a machine that has no core for it
        time.sleep(0.15)
        return "."

    assert render(USER, "{% for _ in range(3) %}{{ wait() }}{% endfor %}", wait=wait) == "..."


def test_every_filter_in_use_is_known() -> None:
    used = {f for t in TEMPLATES.values() for f in re.findall(r"\|\s*([a-z]+)", t)}
    assert used >= {"tojson", "trim", "join", "map"}  # the comparison above really covers them


def test_long_conversations_fit() -> None:
    messages = [{"role": "user", "content": "word " * 20_000}] * 20
    assert len(render(messages, TEMPLATES["chatml"])) > 2_000_000
