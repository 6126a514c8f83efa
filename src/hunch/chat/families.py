"""The table of families: how each writes its calls, and which one a chat template asks for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hunch.chat import gemma, keyed, named
from hunch.chat.harmony import HarmonyForm
from hunch.chat.lark import Rules, quote
from hunch.chat.named import FunctionaryForm, MistralForm, MistralNamedForm
from hunch.chat.nested import MINIMAX_M3, NestedForm
from hunch.chat.pieces import NamedObject, Reader
from hunch.chat.pythonic import PythonicForm
from hunch.chat.recipients import RecipientForm
from hunch.chat.tools import BareForm, ObjectForm, ObjectReader, Tool, ToolForm
from hunch.chat.xtml import KIMI_K3


class ApertusForm(ObjectForm):
    """[{"NAME": {...}}, ...]"""

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return ObjectReader(self.begin, self.end, specials, NamedObject)

    def call(self, rules: Rules, tools: Sequence[Tool]) -> str:
        options = [
            f"{quote('{' + quote(tool.name) + ': ')} {rules.arguments(tool.parameters)}"
            for tool in tools
        ]
        return rules.add("call", f"({' | '.join(options)}) {quote('}')}")


def _marked(name: str) -> ObjectForm:
    """Every call between marks of its own."""
    return ObjectForm(
        begin=(f"<{name}>",),
        end=(f"</{name}>",),
        opening=quote("\n"),
        between=quote("\n"),
        closing=quote("\n"),
        is_repeated=True,
    )


def _listed(begin: str, end: str, line: str = "", **more: Any) -> ObjectForm:
    """All calls between two marks, as a list."""
    before = f",{line}" if line else ", "
    return ObjectForm(
        begin=(begin,),
        end=(end,),
        opening=quote(f"[{line}"),
        between=quote(before),
        closing=quote("\n]" if line else "]"),
        **more,
    )


_LIST: dict[str, Any] = {"opening": '" "? "["', "between": quote(", "), "closing": quote("]")}
_LINE = "\n    "
HERMES = _marked("tool_call")
LLAMA = BareForm(begin=("<|python_tag|>", "<|python_start|>"), arguments="parameters")
PYTHONIC = PythonicForm(begin=("<|python_start|>",), end=("<|python_end|>",))
COHERE = _listed(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    _LINE,
    head=f"{quote('{' + quote('tool_call_id') + ': ' + chr(34))} /[0-9]{{1,4}}/ "
    + quote('", "tool_name": "'),
    arguments="parameters",
)
TOOL_FORMS: dict[str, ToolForm] = {
    **dict.fromkeys(("hermes", "qwen", "qwen3_json", "ernie45", "granite4"), HERMES),
    "longcat": _marked("longcat_tool_call"),
    **dict.fromkeys(("llama3_json", "llama4_json"), LLAMA),
    "mistral": MistralForm(begin=("[TOOL_CALLS]",), **_LIST),
    "mistral_v11": MistralNamedForm(begin=("[TOOL_CALLS]",)),
    "openai": HarmonyForm(),
    "deepseek_v3": named.DEEPSEEK_V3,
    "deepseek_v31": named.DEEPSEEK_V31,
    "deepseek_v32": keyed.DEEPSEEK_V32,
    "deepseek_v4": keyed.DEEPSEEK_V4,
    "deepseek_v41": keyed.DEEPSEEK_V41,
    "dots": keyed.DOTS,
    "kimi_k2": named.KIMI_K2,
    "kimi_k3": KIMI_K3,
    **dict.fromkeys(("pythonic", "llama4_pythonic", "gemma"), PYTHONIC),
    "lfm2": PythonicForm(begin=("<|tool_call_start|>",), end=("<|tool_call_end|>",), is_bare=False),
    "olmo3": PythonicForm(
        begin=("<function_calls>",),
        end=("</function_calls>",),
        is_bare=False,
        layout=("\n", "\n", "\n"),
    ),
    "functiongemma": gemma.FUNCTION_GEMMA,
    "gemma4": gemma.GEMMA_4,
    "granite": ObjectForm(begin=("<|tool_call|>", "<tool_call>"), **_LIST),
    "granite-20b-fc": ObjectForm(begin=("<function_call>",), opening=quote(" "), is_repeated=True),
    "phi4_mini_json": ObjectForm(begin=("functools", "<|tool_call|>"), **_LIST),
    "phi4_mini": ObjectForm(begin=("<|tool_call|>", "functools"), end=("<|/tool_call|>",), **_LIST),
    **dict.fromkeys(
        ("qwen3_coder", "qwen3_xml", "mimo", "nemotron_v3", "step3p5", "step5"), keyed.QWEN_CODER
    ),
    "step3": keyed.STEP_3,
    "seed_oss": keyed.SEED_OSS,
    "glm45": keyed.GLM_45,
    **dict.fromkeys(("glm47", "ling3", "poolside_v1"), keyed.GLM_47),
    "minimax_m2": keyed.MINIMAX_M2,
    "minimax_m3": MINIMAX_M3,
    "minicpm5": keyed.MINICPM_5,
    "hy_v3": keyed.HUNYUAN_3,
    "hunyuan_a13b": _listed("<tool_calls>", "</tool_calls>"),
    "jamba": _listed("<tool_calls>", "</tool_calls>", _LINE),
    "minimax": ObjectForm(
        begin=("<tool_calls>",),
        end=("</tool_calls>",),
        opening=quote("\n"),
        between=quote("\n"),
        closing=quote("\n"),
    ),
    "nemotron_json": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "internlm": ObjectForm(
        begin=("<|action_start|><|plugin|>",),
        end=("<|action_end|>",),
        opening=quote("\n"),
        arguments="parameters",
        is_repeated=True,
    ),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), COHERE),
    "command_r": _listed(
        "Action:\n```json\n", "```", _LINE, head=quote('{"tool_name": "'), arguments="parameters"
    ),
    "apertus": ApertusForm(
        begin=("<|tools_prefix|>",),
        end=("<|tools_suffix|>",),
        opening=quote("["),
        between=quote(", "),
        closing=quote("]"),
    ),
    "gigachat3": ObjectForm(begin=("function call<|role_sep|>\n", "<|function_call|>")),
    "functionary": FunctionaryForm(),
    "functionary_v32": RecipientForm(),
    "xlam": BareForm(is_list=True),
    "json": BareForm(),
}


def spell(form: ToolForm, calls: Sequence[tuple[str, Any]]) -> str:
    """Calls of a history as text, for templates that show tools and leave calls out."""
    if isinstance(form, PythonicForm | keyed.KeyedForm | NestedForm):
        return form.spell(calls)
    form = form if isinstance(form, ObjectForm) else HERMES
    objects = [json.dumps({"name": name, form.arguments: values}) for name, values in calls]
    begin, end = form.begin[0], form.end[0] if form.end else ""
    if form.is_repeated:
        return "\n".join(f"{begin}\n{one}\n{end}" for one in objects)
    return f"{begin}[{', '.join(objects)}]{end}"


SGLANGS_NAMES = {  # of what vLLM calls otherwise
    "apertus2509": "apertus", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4", "glm": "glm45",
    "gpt-oss": "openai", "hunyuan": "hunyuan_a13b", "interns1": "internlm",
    "llama3": "llama3_json", "minimax-m2": "minimax_m2", "minimax-m3": "minimax_m3",
    "qwen25": "hermes", "trinity": "hermes",
}  # fmt: skip
# What a template holds that asks for a family, the first that fits; all of a line must be there.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls>")),
    ("deepseek_v41", ("｜DSML｜ ", "calls>")),
    ("deepseek_v4", ("｜DSML｜",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("dots", ("<dots_function_call>",)),
    ("step3", ("<steptml:invoke",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<parameter=",)),
    ("hy_v3", ("hy_eos", "<tool_sep")),
    ("glm47", ("</arg_key><arg_value>",)),
    ("glm47", ("<arg_key>", '"</arg_key>"')),
    ("glm45", ("<arg_key>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("minicpm5", ("<function name=", "<param name=")),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [",)),
    ("olmo3", ("<function_calls>",)),
    ("internlm", ("<|plugin|>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini_json", ("functools",)),
    ("phi4_mini", ("<|/tool_call|>",)),
    ("phi4_mini", ("<|/tool|>",)),
    ("granite", ("<|tool_call|>",)),
    ("minimax", ("<tool_calls>\\n{",)),
    ("minimax", ("<tool_calls>\n{",)),
    ("jamba", ("<tool_calls>[\\n",)),
    ("jamba", ("<tool_calls>[\n",)),
    ("hunyuan_a13b", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("granite-20b-fc", ("<function_call>",)),
    ("gigachat3", ("function call", "<|role_sep|>")),
    ("functionary", ("<function=", "</function>")),
    ("functionary_v32", (">>>${recipient}",)),
    ("functionary_v32", (">>>all",)),
    ("command_r", ("Action:", "```json", '"tool_name"')),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": dictionary',)),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("python list",)),
    ("xlam", ("single JSON array",)),
)


# Forms of one family. vLLM has one name for them; the template says which it is.
_KIN = (
    {"mistral", "mistral_v11"},
    {"glm45", "glm47"},
    {"phi4_mini", "phi4_mini_json"},
    {"hunyuan_a13b", "jamba", "minimax"},
)


def nearer(given: str, found: str | None) -> str:
    """The form to take where a user names one and the template asks for another."""
    is_kin = found is not None and any({given, found} <= kin for kin in _KIN)
    return found if is_kin and found is not None else given


def tools_of(template: str) -> str | None:
    """The name of the form that a chat template writes calls in; None where it knows no tools."""
    if "tools" not in template:
        return None
    found = (name for name, signs in _SIGNS if all(sign in template for sign in signs))
    return next(found, "json")
