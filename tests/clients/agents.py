#!/usr/bin/env python3
"""An agent framework against an endpoint whose model thinks: agents.py langchain|instructor|llamaindex URL MODEL

Each calls a tool and goes on with its result, sees a thought, and gets a structured answer.
The model cannot reason: it calls a tool where it has to, and its thoughts end by a budget. run.py has the packages.
"""

import asyncio
import sys
from typing import Literal

PROMPT = "What is a lake?"
RESULT = "It is a lake."
LIMITS = {"max_tokens": 160, "temperature": 0}
# A field that no framework has a parameter for.
THOUGHT = {"thinking_token_budget": 16}
SHOWN = []


def find(word: Literal["lake", "river"]) -> str:
    """Finds a word."""
    SHOWN.append(word)
    return RESULT


def word_model():
    from pydantic import BaseModel, ConfigDict

    class Word(BaseModel):
        model_config = ConfigDict(extra="forbid")
        word: Literal["lake", "river"]

    return Word


def expect(fact, what):
    if not fact:
        raise AssertionError(what)


def langchain(endpoint, model):
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_openai import ChatOpenAI

    # ChatOpenAI counts the thought of a chat, but drops its text. It keeps the thought of a response.
    options = {"model": model, "base_url": f"{endpoint}/v1", "api_key": "none", **LIMITS}
    chat = ChatOpenAI(**options, extra_body=THOUGHT)
    Word = word_model()

    @wrap_model_call
    def calls_first(request, handler):
        if request.messages[-1].type == "tool":
            return handler(request.override(tools=[]))
        one = {"parallel_tool_calls": False}
        return handler(request.override(tool_choice="required", response_format=None, model_settings=one))

    agent = create_agent(chat, [find], response_format=ProviderStrategy(Word), middleware=[calls_first])
    state = agent.invoke({"messages": [("user", PROMPT)]})
    _, called, result, answer = state["messages"]
    expect([call["args"]["word"] for call in called.tool_calls] == SHOWN != [], f"no call: {called}")
    expect(result.content == RESULT, f"no result: {result}")
    expect(isinstance(state["structured_response"], Word), f"no structured answer: {answer}")
    for message in (called, answer):
        expect(message.usage_metadata["output_token_details"]["reasoning"] >= 16, f"no thought: {message}")

    bound = chat.bind_tools([find], tool_choice="required", parallel_tool_calls=False)
    chunks = list(bound.stream(PROMPT))
    whole = sum(chunks[1:], chunks[0])
    expect([call["name"] for call in whole.tool_calls] == ["find"], f"no call in a stream: {whole}")
    formed = chat.with_structured_output(Word, method="json_schema").invoke(PROMPT)
    expect(isinstance(formed, Word), f"no structured answer: {formed}")

    thinking = ChatOpenAI(**options | {"max_tokens": 24}, use_responses_api=True)
    for answer in (thinking.invoke(PROMPT), *list(thinking.stream(PROMPT))[-1:]):
        expect(answer.response_metadata["status"] == "incomplete", f"a thought without end: {answer}")
    thoughts = [block for block in thinking.invoke(PROMPT).content if block["type"] == "reasoning"]
    expect(thoughts and thoughts[0]["content"][0]["text"], f"no thought: {thoughts}")


def instructor(endpoint, model):
    import instructor as library
    from openai import OpenAI

    Word = word_model()
    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(OpenAI(base_url=f"{endpoint}/v1", api_key="none"), mode=mode)
        said = [{"role": "user", "content": PROMPT}]
        ask = {"model": model, "response_model": Word, "max_retries": 0, "extra_body": THOUGHT, **LIMITS}
        word, whole = client.chat.completions.create_with_completion(messages=said, **ask)
        message = whole.choices[0].message
        expect(isinstance(word, Word), f"{mode}: no structured answer: {whole}")
        expect(bool(message.tool_calls) == (mode is library.Mode.TOOLS), f"{mode}: {message}")
        expect(message.reasoning and message.reasoning == message.reasoning_content, f"{mode}: no thought: {message}")
        parts = list(client.chat.completions.create_partial(messages=said, **ask))
        expect(parts and parts[-1].word == word.word, f"{mode}: another answer in a stream: {parts}")
        # The conversation goes on, with the thought and the call in it.
        said.append({"content": None} | message.model_dump(exclude_none=True))
        said += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls or []]
        said.append({"role": "user", "content": "Why?"})
        again = client.chat.completions.create(messages=said, **ask)
        expect(isinstance(again, Word), f"{mode}: no structured answer later: {again}")


def llamaindex(endpoint, model):
    from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
    from llama_index.core.base.llms.types import ThinkingBlock
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    kinds = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
    chat = OpenAILike(
        model=model,
        api_base=f"{endpoint}/v1",
        api_key="none",
        context_window=1024,
        additional_kwargs={"extra_body": THOUGHT},
        **LIMITS,
        **kinds,
    )
    Word = word_model()

    def thought(message, what):
        blocks = [block for block in message.blocks if isinstance(block, ThinkingBlock)]
        expect(blocks and blocks[0].content, f"no thought in {what}: {message}")

    thought(chat.chat_with_tools([FunctionTool.from_defaults(find)], PROMPT, tool_required=True).message, "an answer")
    *_, last = chat.stream_chat_with_tools([FunctionTool.from_defaults(find)], PROMPT, tool_required=True)
    thought(last.message, "a stream")
    calls = chat.get_tool_calls_from_response(last)
    expect({call.tool_name for call in calls} == {"find"}, f"no call in a stream: {last}")

    async def converse(streaming):
        calls = {"initial_tool_choice": "find", "allow_parallel_tool_calls": False}
        agent = FunctionAgent(tools=[find], llm=chat, streaming=streaming, **calls)
        handler = agent.run(PROMPT)
        results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
        answer = await handler
        expect(results and results[0].tool_output.content == RESULT, f"no call: {answer}")
        thought(answer.response, "an agent's answer")

    for streaming in (False, True):
        asyncio.run(converse(streaming))
    formed = chat.structured_predict(Word, PromptTemplate(PROMPT))
    expect(isinstance(formed, Word), f"no structured answer: {formed}")


if __name__ == "__main__":
    name, *where = sys.argv[1:]
    {"langchain": langchain, "instructor": instructor, "llamaindex": llamaindex}[name](*where)
