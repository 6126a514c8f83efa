"""Every family's calls, in every shape that answers have, are read alike however they are cut."""

from __future__ import annotations

import json

import pytest

from chat.spelled import BARE, ONE_CALL, SPELLED, Calls
from hunch.chat.families import TOOL_FORMS
from hunch.chat.format import ChatFormat
from hunch.chat.pieces import Answer
from hunch.chat.reasoning import REASONING_FORMS
from hunch.chat.tools import Tool

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "more": {"type": "object"},
        },
        "required": ["city"],
    },
)
ROME: Calls = [("get_weather", {"city": "Rome", "days": 3})]
TWO: Calls = [*ROME, ("get_weather", {"city": "Oslo"})]
HARD: Calls = [
    (
        "get_weather",
        {
            "city": 'a "b" } ] ünï 中文 🎉 <b> {x: [',
            "days": -3,
            "more": {"list": [1, {"deep": None, "on": True}], "text": "x, y: {z} ]"},
        },
    )
]
NAMES = sorted(SPELLED)


def read_in(chunks: list[str], parser: str, tools: list[Tool] | None = None) -> Answer:
    reasoning = "openai_gptoss" if parser == "openai" else "none"
    formatted = ChatFormat("tools", {}, tool_parser=parser, reasoning_parser=reasoning)
    reader = formatted.reader([WEATHER] if tools is None else tools, "")
    assert reader is not None
    answer = Answer()
    for chunk in chunks:
        answer.add(reader.feed(chunk))
    answer.add(reader.finish())
    return answer


def streams(text: str) -> list[list[str]]:
    """Every cut in two, and pieces of one, two, three and seven characters."""
    pieces = [[text[n : n + size] for n in range(0, len(text), size)] for size in (1, 2, 3, 7)]
    return [*pieces, *([text[:n], text[n:]] for n in range(1, len(text)))]


def read_every_way(text: str, parser: str) -> Answer:
    whole = read_in([text], parser)
    for chunks in streams(text):
        assert read_in(chunks, parser) == whole, chunks
    return whole


def calls_of(answer: Answer) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls or ()]


@pytest.mark.parametrize("parser", NAMES)
@pytest.mark.parametrize("calls", [ROME, TWO, HARD], ids=["one", "two", "hard"])
def test_calls_are_read_at_every_cut(parser: str, calls: Calls) -> None:
    if calls is TWO and parser in ONE_CALL:
        pytest.skip("this family calls one function at a time")
    answer = read_every_way(SPELLED[parser](calls), parser)
    assert calls_of(answer) == calls
    assert answer.text == ""


@pytest.mark.parametrize("parser", sorted(set(NAMES) - BARE - {"openai"}))
def test_text_before_a_call_is_text(parser: str) -> None:
    answer = read_every_way(f"I look: a < b.\n\n{SPELLED[parser](ROME)}", parser)
    assert (answer.text, calls_of(answer)) == ("I look: a < b.", ROME)


@pytest.mark.parametrize("parser", NAMES)
def test_a_cut_call_invents_nothing(parser: str) -> None:
    """Wherever the answer ends, there is no other name, and no value that was not written."""
    text = SPELLED[parser](ROME)
    for end in range(len(text)):
        answer = read_in([text[:end]], parser)
        assert answer == read_in(list(text[:end]), parser)
        for call in answer.calls or ():
            assert call.name == "get_weather"
            whole = json.dumps(ROME[0][1], ensure_ascii=False)
            try:
                values = json.loads(call.arguments)
            except ValueError:
                assert whole.startswith(call.arguments)
            else:
                assert values.items() <= ROME[0][1].items()


@pytest.mark.parametrize("parser", sorted(set(NAMES) - {"openai"}))
def test_similar_text_is_no_call(parser: str) -> None:
    for text in ("a <b> [1] {x} (y) <tool", "f(x) = [2, 3]; get_weather", '{"city": "Rome"}'):
        answer = read_every_way(text, parser)
        assert (answer.text, answer.calls) == (text, None)
    begin = SPELLED[parser](ROME).partition("get_weather")[0]
    if parser not in BARE:
        answer = read_every_way(f"A call begins with {begin}", parser)
        assert not answer.calls


@pytest.mark.parametrize("parser", NAMES)
def test_a_call_without_arguments(parser: str) -> None:
    answer = read_every_way(SPELLED[parser]([("now", {})]), parser)
    assert calls_of(answer) == [("now", {})]


def test_numbers_written_as_strings_are_what_the_schema_says() -> None:
    text = "<start_function_call>call:get_weather{city:<escape>7<escape>,days:<escape>3<escape>}"
    answer = read_every_way(f"{text}<end_function_call>", "functiongemma")
    assert calls_of(answer) == [("get_weather", {"city": "7", "days": 3})]


def test_a_call_without_its_outer_marks() -> None:
    text = "I look.\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    answer = read_every_way(f"{text}</tool_call>", "qwen3_coder")
    assert (answer.text, calls_of(answer)) == ("I look.", [("get_weather", {"city": "Rome"})])


def test_the_table_spells_every_form() -> None:
    """Names that share a form need one spelling."""
    spelled = {id(TOOL_FORMS[name]) for name in SPELLED}
    assert [name for name, form in TOOL_FORMS.items() if id(form) not in spelled] == []


# vLLM's own names, of its release 0.33; what is not read is refused by name.
VLLM_TOOLS = [
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "cohere_command3", "dots",
    "deepseek_v41", "cohere_command4", "kimi_k3", "minimax_m3", "qwen3_json", "step5",
    "ernie45", "glm45", "glm47", "ling3", "granite-20b-fc", "granite", "granite4", "hermes",
    "poolside_v1", "hunyuan_a13b", "hy_v3", "internlm", "jamba", "lfm2", "kimi_k2",
    "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "mimo", "minimax_m2",
    "minicpm5", "mistral", "olmo3", "openai", "phi4_mini_json", "pythonic", "qwen3_coder",
    "qwen3_xml", "seed_oss", "step3", "step3p5", "xlam", "gigachat3", "functiongemma",
    "gemma4", "apertus",
]  # fmt: skip
VLLM_REASONING = [
    "deepseek_r1", "deepseek_v3", "deepseek_v4", "poolside_v1", "cohere_command3",
    "deepseek_v41", "cohere_command4", "granite_thinking_parser", "kimi_k3", "minicpmv", "step5",
    "ernie45", "gemma4", "glm45", "glm47", "ling3", "openai_gptoss", "granite", "holo2",
    "hunyuan_a13b", "hy_v3", "kimi_k2", "mimo", "minimax_m2", "minimax_m2_append_think",
    "minimax_m3", "mistral", "nemotron_v3", "olmo3", "qwen3", "seed_oss", "step3", "step3p5",
]  # fmt: skip


def test_names_of_vllm_are_taken() -> None:
    for name in VLLM_TOOLS:
        assert ChatFormat("", {}, tool_parser=name).tool_parser == name
    for name in VLLM_REASONING:
        assert ChatFormat("", {}, reasoning_parser=name).reasoning_parser == name
        assert name in REASONING_FORMS


SGLANG_TOOLS = [
    "apertus2509", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4",
    "dots", "glm", "glm45", "glm47", "gpt-oss", "kimi_k2", "kimi_k3", "lfm2", "llama3", "mimo",
    "minicpm5", "mistral", "poolside_v1", "pythonic", "qwen", "qwen25", "qwen3_coder", "step3",
    "step3p5", "minimax-m2", "minimax-m3", "trinity", "interns1", "hermes", "hunyuan",
    "gigachat3", "gemma4",
]  # fmt: skip
SGLANG_REASONING = [
    "apertus2509", "deepseek-r1", "deepseek-v3", "deepseek-v4", "dots", "glm45", "hunyuan",
    "gpt-oss", "kimi", "kimi_k2", "kimi_k3", "mimo", "poolside_v1", "qwen3", "qwen3-thinking",
    "minimax", "minimax-append-think", "minimax-m3", "step3", "step3p5", "mistral",
    "nemotron_3", "interns1", "gemma4", "cohere_command4",
]  # fmt: skip


def test_names_of_sglang_are_taken() -> None:
    for name in SGLANG_TOOLS:
        assert ChatFormat("", {}, tool_parser=name).tool_parser in TOOL_FORMS
    for name in SGLANG_REASONING:
        assert ChatFormat("", {}, reasoning_parser=name).reasoning_parser in REASONING_FORMS
    assert ChatFormat("", {}, tool_parser="llama3").tool_parser == "llama3_json"
    assert ChatFormat("", {}, reasoning_parser="gpt-oss").reasoning_parser == "openai_gptoss"


def test_the_template_says_which_form_of_a_family_a_name_means() -> None:
    new, old = "{{ tools }} [TOOL_CALLS][ARGS]", "{{ tools }} [TOOL_CALLS] ["
    assert ChatFormat(new, {}, tool_parser="mistral").tool_parser == "mistral_v11"
    assert ChatFormat(old, {}, tool_parser="mistral").tool_parser == "mistral"
    assert ChatFormat(new, {}, tool_parser="hermes").tool_parser == "hermes"


def test_ids_of_calls_are_as_templates_take_them() -> None:
    earlier = [{"role": "assistant", "tool_calls": [{}, {}]}, {"role": "tool"}]
    kimi = ChatFormat("", {}, tool_parser="kimi_k2").call_ids(earlier)
    assert kimi.new("get_weather", 1) == "functions.get_weather:3"
    assert len(ChatFormat("", {}, tool_parser="mistral").call_ids([]).new("f", 0)) == 9
    assert ChatFormat("", {}).call_ids([]).new("f", 0).startswith("call_")


CALLED = [
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}],
    }
]


@pytest.mark.parametrize(
    "parser",
    [
        "granite",
        "phi4_mini",
        "lfm2",
        "hermes",
        "glm45",
        "minimax_m2",
        "minimax_m3",
        "kimi_k2",
        "kimi_k3",
    ],
)
def test_a_template_that_leaves_calls_out_gets_them_as_text(parser: str) -> None:
    formatted = ChatFormat("{{ tools }}", {}, tool_parser=parser)
    (message,), _ = formatted.prepare(CALLED, [])
    assert "tool_calls" not in message
    written = parser if parser != "kimi_k2" else "hermes"
    answer = read_every_way(message["content"], written)
    assert (answer.text, calls_of(answer)) == ("I look.", [("get_weather", {"city": "Rome"})])
    shown = ChatFormat("{{ tools }} message.tool_calls", {}, tool_parser=parser)
    assert "tool_calls" in shown.prepare(CALLED, [])[0][0]


SILENT = [{**CALLED[0], "content": None}]


def test_a_message_that_only_calls_has_no_none_in_it() -> None:
    """Of templates that test other names for none, too: gpt-oss's fails, MiniMax M2's writes it."""
    calls = "{{ tools }} tool_calls {% if last_tool_call.name is none %}{% endif %}"
    for template in (calls, calls + "{% if reasoning_content is none %}{% endif %}"):
        assert ChatFormat(template, {}).prepare(SILENT, [])[0][0]["content"] == ""
    asks = calls + "{% if message['content'] is none %}"
    assert ChatFormat(asks, {}).prepare(SILENT, [])[0][0]["content"] is None


def test_a_model_without_a_system_message_is_told_of_tools_by_the_user() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    ask = [{"role": "user", "content": "What time is it?"}]
    for why in ("System role not supported", "Only user and assistant roles are supported!"):
        (message,), _ = ChatFormat(f"{{{{ raise_exception('{why}') }}}}", {}).prepare(ask, tools)
        assert message["role"] == "user"
        assert '{"name": "now"}' in message["content"]
        assert message["content"].endswith("\n\nWhat time is it?")
    assert [m["role"] for m in ChatFormat("", {}).prepare(ask, tools)[0]] == ["system", "user"]


def test_functionarys_template_gets_arguments_as_text() -> None:
    formatted = ChatFormat("{{ tools }} tool_calls >>>${recipient}", {})
    assert formatted.tool_parser == "functionary_v32"
    (message,), _ = formatted.prepare(CALLED, [])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


def test_a_prompt_may_have_written_the_first_recipients_sign() -> None:
    formatted = ChatFormat("", {}, tool_parser="functionary_v32")

    def read(text: str, prompt: str) -> list[Answer]:
        answers = []
        for chunks in ([text], *streams(text)):
            reader, answer = formatted.reader([WEATHER], prompt), Answer()
            assert reader is not None
            for chunk in chunks:
                answer.add(reader.feed(chunk))
            answer.add(reader.finish())
            answers.append(answer)
        assert all(answer == answers[0] for answer in answers)
        return answers

    text = 'all\nI look.>>>get_weather\n{"city": "Rome"}>>>get_weather\n{"city": "Oslo"}'
    answer = read(text, "assistant\n\n>>>")[0]
    cities = [{"city": "Rome"}, {"city": "Oslo"}]
    assert answer.text == "I look."
    assert calls_of(answer) == [("get_weather", city) for city in cities]
    answer = read('get_weather\n{"city": "Rome"}', ">>>")[0]
    assert (answer.text, calls_of(answer)) == ("", [("get_weather", cities[0])])
    for said in ("It is >>> x = 1\nwarm.", "all of it\n>>>", "a\n\nb"):
        assert read(said, ">>>")[0] == Answer(text=said)
        assert read(said, "assistant\n")[0] == Answer(text=said)


def test_nested_elements_are_what_the_schema_says() -> None:
    point = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "at": {"$ref": "#/$defs/n"}},
    }
    tool = Tool("go", {
        "properties": {
            "stops": {"type": "array", "items": point}, "zip": {"type": "string"},
            "none": {"type": "array", "items": {"type": "integer"}}, "any": {},
            "all": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        },
        "$defs": {"n": {"type": "string"}},
    })  # fmt: skip
    values = {
        "stops": [{"name": "1", "at": "2"}, {"name": " a\nb "}], "zip": "018", "none": [],
        "any": [1, "x"], "all": "7",
    }  # fmt: skip
    answer = read_in([SPELLED["minimax_m3"]([("go", values)])], "minimax_m3", [tool])
    assert calls_of(answer) == [("go", values)]


def test_channels_around_text_and_calls_are_not_text() -> None:
    formatted = ChatFormat("", {}, tool_parser="kimi_k3", reasoning_parser="kimi_k3")
    said = "<|open|>response<|sep|>I look.<|close|>response<|sep|>"
    text = f"Hm.<|close|>think<|sep|>{said}{SPELLED['kimi_k3'](TWO)}<|close|>message<|sep|>"
    for chunks in ([text], *streams(text)):
        reader, answer = formatted.reader([WEATHER], "<|open|>think<|sep|>"), Answer()
        assert reader is not None
        for chunk in chunks:
            answer.add(reader.feed(chunk))
        answer.add(reader.finish())
        assert (answer.text, answer.reasoning, calls_of(answer)) == ("I look.", "Hm.", TWO)


def test_tools_reach_a_template_that_looks_for_them_in_a_message() -> None:
    template = "{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}"
    formatted = ChatFormat(template, {})
    assert formatted.tool_parser == "phi4_mini"
    tools = [{"type": "function", "function": {"name": "now"}}]
    for start in ([], [{"role": "system", "content": "Hi."}]):
        messages, _ = formatted.prepare([*start, {"role": "user", "content": "x"}], tools)
        assert json.loads(messages[0]["tools"]) == [{"name": "now"}]
        assert [message["role"] for message in messages] == ["system", "user"]


# What published templates hold of their calls and reasoning.
TEMPLATES: dict[str, tuple[str, str]] = {
    '<tool_call>\\n{"name": <function-name>': ("hermes", "none"),
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<think>": ("glm45", "qwen3"),
    "<tool_call>{n}<arg_key>{k}</arg_key><arg_value>{v}</arg_value>": ("glm47", "none"),
    "<seed:tool_call>\\n<function=f>\\n<parameter=a><seed:think>": ("seed_oss", "seed_oss"),
    "'<minimax:tool_call>' <invoke name= '<think>'": ("minimax_m2", "qwen3"),
    "<｜tool▁calls▁begin｜><｜tool▁sep｜></think>": ("deepseek_v31", "qwen3"),
    "'｜DSML｜' '<' + dsml_token + 'function_calls>' '<think>'": ("deepseek_v32", "qwen3"),
    "'｜DSML｜' '<' + dsml_token + 'tool_calls>'": ("deepseek_v4", "none"),
    "<|tool_calls_section_begin|>": ("kimi_k2", "none"),
    "']<]minimax[>[' <tool_call> <mm:think>": ("minimax_m3", "minimax_m3"),
    "'<|open|>' + tag '<|sep|>' '<|close|>' open_tag('think')": ("kimi_k3", "kimi_k3"),
    "Respond in this format:\n>>>${recipient}\n${content}": ("functionary_v32", "none"),
    '\nAction:\n```json\n[\n {\n "tool_name": "': ("command_r", "none"),
    "<dots_function_call> <think>": ("dots", "qwen3"),
    "Here are my reasoning steps:\n [BEGIN FINAL RESPONSE] <tool_calls>[\n": ("jamba", "apriel"),
    "'[TOOL_CALLS]' + name + '[ARGS]' + arguments": ("mistral_v11", "none"),
    "<|tool_call>call: <|channel>thought": ("gemma4", "gemma4"),
    "<|START_ACTION|>[ <|START_THINKING|>": ("cohere_command3", "cohere_command3"),
    "<|action_start|><|plugin|>": ("internlm", "none"),
    "<|tool_call_start|>[": ("lfm2", "none"),
    "<TOOLCALL>[ <think>": ("nemotron_json", "qwen3"),
    '<tool_calls>[{"name" <think> <|extra_0|>': ("hunyuan_a13b", "hunyuan_a13b"),
    '<tool_calls>\\n{"name"': ("minimax", "none"),
    "<|tool_call|> <think></think> <response></response>": ("granite", "granite3_3"),
    "[func_name1(params_name1=params_value1)]": ("pythonic", "none"),
    "<|tools_prefix|> <|inner_prefix|>": ("apertus", "apertus"),
    '<function=NAME>{"example_name": "example_value"}</function> <|python_tag|>': (
        "functionary",
        "none",
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_form_is_found_from_the_template(template: str) -> None:
    formatted = ChatFormat("{{ tools }} " + template, {})
    assert (formatted.tool_parser, formatted.reasoning_parser) == TEMPLATES[template]


THOUGHTS: dict[str, tuple[str, str]] = {
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "hy_v3": ("<think:opensource>", "</think:opensource>"),
    "exaone_deep": ("<thought>\n", "\n</thought>\n\n"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "apriel": ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought\n", "\n<channel|>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "granite": ("Here is my thought process: ", " Here is my response: "),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n<answer>\n"),
    "ernie45": ("<think>\n", "\n</think>\n\n<response>\n"),
}
CLOSING = {
    "kimi_k3": "<|close|>response<|sep|>",
    "hunyuan_a13b": "\n</answer>",
    "ernie45": "\n</response>\n",
}


def test_every_reasoning_form_is_spelled() -> None:
    forms = {REASONING_FORMS[name] for name in THOUGHTS}
    known = {form for form in REASONING_FORMS.values() if form and not form.is_always_there}
    assert forms == known


@pytest.mark.parametrize("parser", THOUGHTS)
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_told_from_the_answer_at_every_cut(parser: str, is_open: bool) -> None:
    begin, end = THOUGHTS[parser]
    formatted = ChatFormat("tools", {}, reasoning_parser=parser)
    said = ("" if is_open else begin) + "I < think." + end + "Yes & no." + CLOSING.get(parser, "")

    def read(chunks: list[str]) -> Answer:
        reader = formatted.reader([], begin if is_open else "assistant\n")
        assert reader is not None
        answer = Answer()
        for chunk in chunks:
            answer.add(reader.feed(chunk))
        answer.add(reader.finish())
        return answer

    for chunks in ([said], *streams(said)):
        answer = read(chunks)
        assert (answer.text.rstrip(), answer.reasoning) == ("Yes & no.", "I < think."), chunks
