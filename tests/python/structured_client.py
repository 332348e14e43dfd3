"""Binds answers of a running Remoe endpoint to forms, through clients that people use.

    python structured_client.py http://127.0.0.1:PORT MODEL SCHEMAS

Ends with 0 when every check holds. It expects a model with a tokenizer and a chat template, and assumes nothing about
what the model says: every answer that ends by itself has the form that was asked for. SCHEMAS is how many random JSON
Schemas are tried.
"""

import concurrent.futures
import json
import os
import random
import sys
from typing import Literal

# It would ask the network for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import jsonschema
import litellm
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "Tell me about the weather."}]


class Place(BaseModel):
    """Where it is."""

    name: str = Field(max_length=12)
    degrees: int = Field(ge=-50, le=50)


class Weather(BaseModel):
    """What the weather is like."""

    kind: Literal["sun", "rain", "snow"]
    sure: bool
    places: list[Place] = Field(max_length=2)


WEATHER = Weather.model_json_schema()
TOOL = {
    "type": "function",
    "function": {"name": "report", "description": "Reports the weather.", "parameters": WEATHER},
}
OTHER = {"type": "function", "function": {"name": "sleep", "parameters": {"type": "object", "properties": {}}}}


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def equal(got, expected, what):
    check(got == expected, f"{what}: got {got!r}, expected {expected!r}")


def parse(client, model):
    answer = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Weather, n=2, seed=5)
    for choice in answer.choices:
        equal(choice.finish_reason, "stop", "parse: finish_reason")
        check(isinstance(choice.message.parsed, Weather), f"parse: {choice.message!r}")
    with client.chat.completions.stream(model=model, messages=MESSAGES, response_format=Weather) as stream:
        check(isinstance(stream.get_final_completion().choices[0].message.parsed, Weather), "parse: stream")
    cut = client.chat.completions.create(
        model=model, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=1
    )
    equal(cut.choices[0].finish_reason, "length", "cut off: finish_reason")


def tools(client, model):
    tool = openai.pydantic_function_tool(Weather, name="report")
    for choice in ["required", {"type": "function", "function": {"name": "report"}}]:
        ask = {"model": model, "messages": MESSAGES, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        message = client.chat.completions.parse(**ask, seed=3).choices[0].message
        check(isinstance(message.tool_calls[0].function.parsed_arguments, Weather), f"tools: {message!r}")
        with client.chat.completions.stream(**ask, seed=3) as stream:
            parts = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            streamed = stream.get_final_completion().choices[0]
        equal(streamed.finish_reason, "tool_calls", "tools: finish_reason")
        call, whole = streamed.message.tool_calls[0].function, message.tool_calls[0].function
        equal((call.name, call.arguments), (whole.name, whole.arguments), "tools: streamed, beside the answer in one")
        check(len(parts) > 1, "tools: the arguments come in parts")
    # The model decides, and calls once at most.
    ask = {"model": model, "messages": MESSAGES, "tools": [TOOL, OTHER], "max_tokens": 60, "temperature": 1}
    for seed in range(4):
        free = client.chat.completions.create(**ask, seed=seed, parallel_tool_calls=False).choices[0]
        check(len(free.message.tool_calls or []) <= 1, f"tools: {free.message!r}")
    # Required and cut off: what was written of it, and nothing of its format.
    for length in [1, 4, 12, 20]:
        cut = client.chat.completions.create(**(ask | {"max_tokens": length}), tool_choice="required").choices[0]
        equal(cut.finish_reason, "length", "tools, cut off: finish_reason")
        check(not cut.message.content, f"tools, cut off: {cut.message!r}")
    # What was called and what came of it go back to the model.
    called = {"role": "assistant", "tool_calls": [message.tool_calls[0].model_dump(include={"id", "type", "function"})]}
    called["tool_calls"][0]["function"].pop("parsed_arguments", None)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noted"}
    after = client.chat.completions.create(
        model=model, messages=[*MESSAGES, called, result], tools=[tool], max_tokens=4, tool_choice="auto"
    )
    check(after.usage.prompt_tokens > 0, "tools: the second turn")


def vllm(client, model):
    def text(**extra):
        answer = client.completions.create(model=model, prompt="It is", max_tokens=100, seed=1, extra_body=extra)
        equal(answer.choices[0].finish_reason, "stop", f"{extra}: finish_reason")
        return answer.choices[0].text

    for name in ["guided_choice", "structured_outputs"]:
        choices = ["red", "green"]
        value = {"choice": choices} if name == "structured_outputs" else choices
        check(text(**{name: value}) in choices, name)
    date = text(structured_outputs={"regex": r"\d{4}-\d\d"})
    check(len(date) == 7 and date[4] == "-", f"regex: {date!r}")
    equal(text(guided_grammar='start: "a" "b"'), "ab", "grammar")
    equal(text(guided_regex="ab{3}c", stop="c"), "abbb", "a stop text within a form")


def alone_and_together(client, model):
    """Seeded answers are the same beside others that are bound by something else, or by nothing."""

    def ask(seed):
        extra = {"response_format": {"type": "json_object"}} if seed % 2 else {}
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=24, temperature=1, seed=seed, n=2, logprobs=True, **extra
        )
        return [(choice.message.content, choice.logprobs.content[-1].logprob) for choice in answer.choices]

    seeds = range(6)
    alone = [ask(seed) for seed in seeds]
    with concurrent.futures.ThreadPoolExecutor(len(seeds)) as pool:
        equal(list(pool.map(ask, seeds)), alone, "alone and together")


def langchain(url, model):
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, seed=2)
    for method in ["json_schema", "function_calling"]:
        answer = chat.with_structured_output(Weather, method=method).invoke("How is the weather?")
        check(isinstance(answer, Weather), f"langchain, {method}: {answer!r}")


def lite(url, model):
    ask = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "messages": MESSAGES, "seed": 4}
    answer = litellm.completion(**ask, tools=[TOOL, OTHER], tool_choice="required", parallel_tool_calls=False)
    equal(answer.choices[0].finish_reason, "tool_calls", "litellm: finish_reason")
    call = answer.choices[0].message.tool_calls[0].function
    check(call.name in ("report", "sleep"), f"litellm: {call!r}")
    if call.name == "report":
        Weather.model_validate_json(call.arguments)


def random_schema(rng, depth=0):
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "format", "pattern"]
    if depth < 3:
        kinds += ["object", "object", "array", "array", "anyOf", "tuple", "map", "ref"]
    kind = rng.choice(kinds)
    inner = lambda: random_schema(rng, depth + 1)
    low, high = sorted(rng.sample(range(-300, 300), 2))
    if kind == "integer":
        return {"type": "integer", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): high}
    if kind == "number":
        return {"type": "number", "minimum": low, "maximum": high, "multipleOf": rng.choice([0.5, 0.25, 2])}
    if kind == "string":
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
    if kind in ("boolean", "null"):
        return {"type": ["boolean", "null"] if rng.random() < 0.2 else kind}
    if kind == "enum":
        return {"enum": rng.sample(["a", "bé", 1, -2, 2.5, True, None, [1], {"k": "v"}, 'q"\\'], 4)}
    if kind == "const":
        return {"const": rng.choice(["x y", 7, {"a": [1, {"b": None}]}, [], False])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["uuid", "ipv4", "date"])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(ab|c)d?$", r"^\d{1,3}\.$"])}
    if kind == "object":
        names = rng.sample(["id", "name", "é", "a b", "not", "$ref", 'q"'], rng.randrange(1, 4))
        required = [name for name in names if rng.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: inner() for name in names},
            "required": required,
            "additionalProperties": False,
        }
    if kind == "map":
        return {"type": "object", "additionalProperties": inner(), "minProperties": rng.randrange(2), "maxProperties": 2}
    if kind == "array":
        return {"type": "array", "items": inner(), "minItems": rng.randrange(2), "maxItems": rng.randrange(2, 4)}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), inner()], "minItems": 2, "items": False}
    if kind == "anyOf":
        return {"anyOf": [inner(), inner()]}
    return {"allOf": [{"$ref": "#/$defs/kind"}], "description": "by reference"}


def random_schemas(client, model, count):
    """Every answer that ends by itself is JSON that its schema takes, as an independent validator sees it."""

    def one(seed):
        rng = random.Random(seed)
        definition = random_schema(rng, 3)
        schema = {"$defs": {"kind": definition}, **random_schema(rng)}
        form = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}}
        choice = client.chat.completions.create(
            model=model, messages=MESSAGES, response_format=form, max_tokens=200, temperature=1, seed=seed
        ).choices[0]
        if choice.finish_reason == "length":
            return False
        equal(choice.finish_reason, "stop", f"{schema}: finish_reason")
        jsonschema.validate(json.loads(choice.message.content), schema, jsonschema.Draft202012Validator)
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ended = sum(pool.map(one, range(count)))
    print(f"{ended} of {count} answers ended by themselves and are what their schemas say")
    check(ended * 2 > count, f"only {ended} of {count} answers ended")


def main():
    url, model, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    parse(client, model)
    tools(client, model)
    vllm(client, model)
    alone_and_together(client, model)
    langchain(url, model)
    lite(url, model)
    random_schemas(client, model, count)
    print("everything holds")


if __name__ == "__main__":
    main()
