"""LangChain over the server; any of its chat models for OpenAI's API works.

pip install langchain-openai
python examples/langchain_chat.py
"""

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from local_server import server


def main() -> None:
    with server("--model", "smollm2-135m", "--max-model-len", "1024") as url:
        model = ChatOpenAI(
            base_url=url, api_key="none", model="smollm2-135m", temperature=0, max_tokens=48
        )
        prompt = ChatPromptTemplate.from_messages(
            [("system", "Answer in one sentence."), ("user", "What is {thing} used for?")]
        )
        print((prompt | model).invoke({"thing": "a compass"}).content)


if __name__ == "__main__":
    main()
