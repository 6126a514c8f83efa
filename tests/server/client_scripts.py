"""What users run with their clients, unmodified: `python client_scripts.py CLIENT URL` prints what
came back as JSON. It imports nothing of hunch, so that any interpreter can run it.

The server's model says what a prompt tells it to (`SAY[text]YAS`), so a whole agent's loop is known
beforehand: it calls `get_weather`, gets the tool's result, and says what that tells it to.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASK = f"SAY[{CALL}]YAS"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


def weather_of(city: str) -> str:
    return f"SAY[It is warm in {city}.]YAS"


def run_anthropic(url: str) -> Any:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none")
    tools: Any = [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}]
    said: Any = [{"role": "user", "content": ASK}]
    fields: Any = {"model": "bytes", "max_tokens": 300, "tools": tools}
    count = client.messages.count_tokens(model="bytes", messages=said, tools=tools).input_tokens
    first = client.messages.create(messages=said, **fields)
    assert first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) == count
    (use,) = first.content
    assert (use.type, first.stop_reason) == ("tool_use", "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": weather_of(**use.input)}
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=said, **fields) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    return text


def run_openai_agents(url: str) -> Any:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return weather_of(city)

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    texts = []
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="bytes", openai_client=client)
        agent = Agent(name="a", instructions="Help.", model=model, tools=[get_weather])
        texts.append(asyncio.run(_run_twice(Runner, agent)))
    assert texts[0] == texts[1]
    return texts[0]


async def _run_twice(runner: Any, agent: Any) -> str:
    whole = await runner.run(agent, ASK)
    streamed = runner.run_streamed(agent, ASK)
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == whole.final_output
    return str(whole.final_output)


def run_langchain(url: str) -> Any:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return weather_of(city)

    model = ChatOpenAI(model="bytes", base_url=f"{url}/v1", api_key="none")  # type: ignore[arg-type]
    bound = model.bind_tools([get_weather])
    said: Any = [HumanMessage(ASK)]
    said.append(bound.invoke(said))
    for call in said[-1].tool_calls:
        said.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    return "".join(str(chunk.content) for chunk in bound.stream(said))


def run_instructor(url: str) -> Any:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"))
    said = ASK.replace("get_weather", "City")
    found: Any = client.chat.completions.create(
        model="bytes", response_model=City, messages=[{"role": "user", "content": said}]
    )
    return f"It is warm in {found.city}."


def run_pydantic_ai(url: str) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel("bytes", provider=provider))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return weather_of(city)

    return agent.run_sync(ASK).output


def run_litellm(url: str) -> Any:
    import litellm

    said: Any = [{"role": "user", "content": ASK}]
    fields: Any = {"model": "openai/bytes", "api_base": f"{url}/v1", "api_key": "none"}
    first = litellm.completion(messages=said, tools=[TOOL], **fields).choices[0].message
    (call,) = first.tool_calls
    result = weather_of(**json.loads(call.function.arguments))
    said += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    chunks = litellm.completion(messages=said, tools=[TOOL], stream=True, **fields)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def run_ollama(url: str) -> Any:
    import ollama

    client = ollama.Client(host=url)
    assert client.list().models[0].model == "bytes"
    assert "tools" in (client.show("bytes").capabilities or ())
    assert client.generate("bytes", "SAY[yes]YAS").response == "yes"

    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return weather_of(city)

    said: Any = [{"role": "user", "content": ASK}]
    first = client.chat("bytes", messages=said, tools=[get_weather]).message
    said.append(first)
    for call in first.tool_calls or ():
        content = get_weather(**call.function.arguments)
        said.append({"role": "tool", "tool_name": call.function.name, "content": content})
    parts = client.chat("bytes", messages=said, tools=[get_weather], stream=True)
    return "".join(part.message.content or "" for part in parts)


def run_llama_index(url: str) -> Any:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="bytes", api_base=f"{url}/v1", api_key="none", is_chat_model=True, max_tokens=300
    )
    said = [ChatMessage(role="user", content=ASK)]
    first = model.chat(said, tools=[TOOL]).message
    (call,) = first.additional_kwargs["tool_calls"]
    result = weather_of(**json.loads(call.function.arguments))
    extra = {"tool_call_id": call.id}
    said += [first, ChatMessage(role="tool", content=result, additional_kwargs=extra)]
    return "".join(part.delta or "" for part in model.stream_chat(said))


CLIENTS = {
    "anthropic": run_anthropic,
    "agents": run_openai_agents,
    "langchain_openai": run_langchain,
    "instructor": run_instructor,
    "pydantic_ai": run_pydantic_ai,
    "litellm": run_litellm,
    "ollama": run_ollama,
    "llama_index": run_llama_index,
}

if __name__ == "__main__":
    print(json.dumps({"answer": CLIENTS[sys.argv[1]](sys.argv[2])}))
