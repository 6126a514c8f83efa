"""Calls as each family's published chat template writes them, by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]
DS = "<｜tool▁"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def objects(calls: Calls, arguments: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{arguments}": {as_json(values)}}}' for name, values in calls]


def marked(begin: str, end: str, between: str = "", **keys: str) -> Callable[[Calls], str]:
    return lambda calls: between.join(f"{begin}{one}{end}" for one in objects(calls, **keys))


def listed(begin: str, between: str, end: str) -> Callable[[Calls], str]:
    return lambda calls: begin + between.join(objects(calls)) + end


def keyed(
    call: str, pair: str, end: str, between: str, opening: str = "", closing: str = ""
) -> Callable[[Calls], str]:
    """Marks with NAME, KEY, VALUE and IS_TEXT in them."""

    def spell(calls: Calls) -> str:
        said = []
        for name, values in calls:
            pairs = [
                pair.replace("KEY", key)
                .replace("IS_TEXT", str(isinstance(value, str)).lower())
                .replace("VALUE", bare(value))
                for key, value in values.items()
            ]
            said.append(call.replace("NAME", name) + "".join(pairs) + end)
        return opening + between.join(said) + closing

    return spell


def python_calls(calls: Calls, between: str = ", ") -> str:
    return between.join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
        for name, values in calls
    )


def gemma(begin: str, end: str, mark: str) -> Callable[[Calls], str]:
    def said(value: Any) -> str:
        if isinstance(value, str):
            return f"{mark}{value}{mark}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{said(part)}" for key, part in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(said, value)) + "]"
        return as_json(value)

    return lambda calls: "".join(f"{begin}call:{name}{said(args)}{end}" for name, args in calls)


def deepseek_v3(calls: Calls) -> str:
    one = [
        f"{DS}call▁begin｜>function{DS}sep｜>{name}\n```json\n{as_json(values)}\n```{DS}call▁end｜>"
        for name, values in calls
    ]
    return f"{DS}calls▁begin｜>" + "\n".join(one) + f"{DS}calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    one = [f"{DS}call▁begin｜>{name}{DS}sep｜>{as_json(v)}{DS}call▁end｜>" for name, v in calls]
    return f"{DS}calls▁begin｜>" + "".join(one) + f"{DS}calls▁end｜>"


def kimi(calls: Calls) -> str:
    one = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{as_json(values)}<|tool_call_end|>"
        for number, (name, values) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(one) + "<|tool_calls_section_end|>"


def harmony(calls: Calls) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(values)}"
        for name, values in calls
    )


def cohere(calls: Calls) -> str:
    one = [
        f'{{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {as_json(values)}}}'
        for number, (name, values) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(one) + "\n]<|END_ACTION|>"


def apertus(calls: Calls) -> str:
    one = [f'{{"{name}": {as_json(values)}}}' for name, values in calls]
    return "<|tools_prefix|>[" + ", ".join(one) + "]<|tools_suffix|>"


def dsml(section: str) -> Callable[[Calls], str]:
    mark = "｜DSML｜" + " " * section.startswith(" ")
    section = section.strip()
    return keyed(
        f'<{mark}invoke name="NAME">\n',
        f'<{mark}parameter name="KEY" string="IS_TEXT">VALUE</{mark}parameter>\n',
        f"</{mark}invoke>",
        "\n",
        f"<{mark}{section}>\n",
        f"\n</{mark}{section}>",
    )


def kimi_k3(calls: Calls) -> str:
    types = {str: "string", int: "number", dict: "object"}
    said = []
    for number, (name, values) in enumerate(calls, 1):
        pairs = [
            f'<|open|>argument key="{key}" type="{types[type(value)]}"<|sep|>{bare(value)}'
            "<|close|>argument<|sep|>"
            for key, value in values.items()
        ]
        head = f'<|open|>call tool="{name}" index="{number}"<|sep|>'
        said.append(head + "".join(pairs) + "<|close|>call<|sep|>")
    return f"<|open|>tools<|sep|>{''.join(said)}<|close|>tools<|sep|>"


def minimax_m3(calls: Calls) -> str:
    sign = "]<]minimax[>["

    def said(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(f"{sign}<{key}>{said(v)}{sign}</{key}>" for key, v in value.items())
        if isinstance(value, list):
            return "".join(f"{sign}<item>{said(part)}{sign}</item>" for part in value)
        return bare(value)

    one = [f'{sign}<invoke name="{name}">{said(values)}{sign}</invoke>\n' for name, values in calls]
    return f"{sign}<tool_call>\n{''.join(one)}{sign}</tool_call>"


def command_r(calls: Calls) -> str:
    one = [f'{{"tool_name": "{name}", "parameters": {as_json(v)}}}' for name, v in calls]
    return "Action:\n```json\n[\n    " + ",\n    ".join(one) + "\n]```"


HY = ":opensource>"
SPELLED: dict[str, Callable[[Calls], str]] = {
    "hermes": marked("<tool_call>\n", "\n</tool_call>", "\n"),
    "ernie45": marked("<tool_call>\n", "\n</tool_call>", "\n"),
    "longcat": marked("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"),
    "llama3_json": lambda calls: "; ".join(objects(calls, "parameters")),
    "mistral": listed("[TOOL_CALLS][", ", ", "]"),
    "mistral_v11": lambda calls: "".join(
        f"[TOOL_CALLS]{name}[ARGS]{as_json(values)}" for name, values in calls
    ),
    "openai": harmony,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml(" calls"),
    "kimi_k2": kimi,
    "kimi_k3": kimi_k3,
    "minimax_m3": minimax_m3,
    "command_r": command_r,
    "functionary_v32": lambda calls: "".join(f">>>{n}\n{as_json(v)}" for n, v in calls),
    "dots": keyed(
        '<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>",
        "\n",
        "<dots_function_call>\n",
        "\n</dots_function_call>",
    ),
    "pythonic": lambda calls: f"[{python_calls(calls)}]",
    "lfm2": lambda calls: f"<|tool_call_start|>[{python_calls(calls)}]<|tool_call_end|>",
    "olmo3": lambda calls: f"<function_calls>\n{python_calls(calls, chr(10))}\n</function_calls>",
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "granite": listed("<|tool_call|>[", ", ", "]"),
    "granite-20b-fc": marked("<function_call> ", ""),
    "phi4_mini_json": listed("functools[", ", ", "]"),
    "phi4_mini": listed("<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "qwen3_coder": keyed(
        "<tool_call>\n<function=NAME>\n",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
        "</function>\n</tool_call>",
        "\n",
    ),
    "seed_oss": keyed(
        "<seed:tool_call>\n<function=NAME>\n",
        "<parameter=KEY>VALUE</parameter>\n",
        "</function>\n</seed:tool_call>",
        "\n",
    ),
    "glm45": keyed(
        "<tool_call>NAME\n",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        "</tool_call>",
        "\n",
    ),
    "glm47": keyed(
        "<tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "</tool_call>", ""
    ),
    "minimax_m2": keyed(
        '<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>",
        "\n",
        "<minimax:tool_call>\n",
        "\n</minimax:tool_call>",
    ),
    "minicpm5": keyed(
        '<function name="NAME">', '<param name="KEY">VALUE</param>', "</function>", "\n"
    ),
    "step3": keyed(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        "</steptml:invoke><｜tool_call_end｜>",
        "",
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
    ),
    "hy_v3": keyed(
        f"<tool_call{HY}NAME<tool_sep{HY}\n",
        f"<arg_key{HY}KEY</arg_key{HY}\n<arg_value{HY}VALUE</arg_value{HY}\n",
        f"</tool_call{HY}",
        "\n",
        f"<tool_calls{HY}\n",
        f"\n</tool_calls{HY}",
    ),
    "hunyuan_a13b": listed("<tool_calls>[", ", ", "]</tool_calls>"),
    "jamba": listed("<tool_calls>[\n    ", ",\n    ", "\n]</tool_calls>"),
    "minimax": listed("<tool_calls>\n", "\n", "\n</tool_calls>"),
    "nemotron_json": listed("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "internlm": marked("<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters"),
    "cohere_command3": cohere,
    "apertus": apertus,
    "gigachat3": listed("function call<|role_sep|>\n", "", ""),
    "functionary": lambda calls: "".join(
        f"<function={name}>{as_json(values)}</function>" for name, values in calls
    ),
    "xlam": listed("[", ", ", "]"),
    "json": listed("", "; ", ""),
}
BARE = {"llama3_json", "pythonic", "xlam", "json"}  # a call is the whole answer
ONE_CALL = {"gigachat3"}  # never two
