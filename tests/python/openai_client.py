"""Talks to a running Remoe endpoint through the official `openai` package.

    python openai_client.py http://127.0.0.1:PORT MODEL [API_KEY]

Ends with 0 when every check holds, else with 1 and the check that failed. It expects a model with a
tokenizer and a chat template, and assumes nothing about what the model says.
"""

import asyncio
import struct
import sys

import openai

PROMPT = "The weather today is"
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": [{"type": "text", "text": "Tell me something."}]},
]
# Answers of a fixed length, whatever the model would like.
FIXED = {"ignore_eos": True}
EPSILON = 1e-4


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def equal(got, expected, what):
    check(got == expected, f"{what}: got {got!r}, expected {expected!r}")


def check_usage(usage, completion_tokens, what):
    check(usage is not None, f"{what}: no usage")
    check(usage.prompt_tokens > 0, f"{what}: no prompt tokens in {usage}")
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, f"{what}: total_tokens")
    if completion_tokens is not None:
        equal(usage.completion_tokens, completion_tokens, f"{what}: completion_tokens")


def refused(error_class, call, what, status, param=None, code=None):
    try:
        call()
    except error_class as error:
        equal(error.status_code, status, f"{what}: status")
        check(isinstance(error.body, dict), f"{what}: the error has no body")
        equal(set(error.body), {"message", "type", "param", "code"}, f"{what}: keys of the error")
        if param is not None:
            equal(error.param, param, f"{what}: param")
        if code is not None:
            equal(error.code, code, f"{what}: code")
        return
    raise AssertionError(f"{what}: was not refused with {error_class.__name__}")


def models(client, model):
    listed = [entry.id for entry in client.models.list()]
    check(model in listed, f"models.list: {model!r} is not in {listed}")
    equal(client.models.retrieve(model).id, model, "models.retrieve")


def chat(client, model):
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0)
    equal(whole.object, "chat.completion", "chat: object")
    equal(whole.model, model, "chat: model")
    choice = whole.choices[0]
    equal(choice.message.role, "assistant", "chat: role")
    check(isinstance(choice.message.content, str), f"chat: content is {choice.message.content!r}")
    check(choice.finish_reason in ("stop", "length"), f"chat: finish_reason is {choice.finish_reason!r}")
    check_usage(whole.usage, None, "chat")
    check(whole.usage.completion_tokens <= 12, f"chat: {whole.usage.completion_tokens} tokens of at most 12")

    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    last = chunks.pop()
    equal(last.choices, [], "chat stream: choices of the usage chunk")
    equal(last.usage.total_tokens, whole.usage.total_tokens, "chat stream: total_tokens")
    check(all(chunk.usage is None for chunk in chunks), "chat stream: usage before the last chunk")
    equal({chunk.id for chunk in chunks}, {last.id}, "chat stream: ids")
    equal({chunk.object for chunk in chunks}, {"chat.completion.chunk"}, "chat stream: object")
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    equal(roles, ["assistant"] + [None] * (len(roles) - 1), "chat stream: roles")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    equal(text, choice.message.content, "chat stream: text, beside the answer without a stream")
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    equal(reasons, [None] * (len(reasons) - 1) + [choice.finish_reason], "chat stream: finish reasons")

    newer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=3, temperature=0, extra_body=FIXED
    )
    check_usage(newer.usage, 3, "max_completion_tokens")
    equal(newer.choices[0].finish_reason, "length", "max_completion_tokens: finish_reason")


def completions(client, model):
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=10, temperature=0, extra_body=FIXED)
    equal(whole.object, "text_completion", "completion: object")
    equal(whole.choices[0].finish_reason, "length", "completion: finish_reason")
    check_usage(whole.usage, 10, "completion")
    text = whole.choices[0].text

    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=10, temperature=0, extra_body=FIXED, stream=True
    )
    chunks = list(stream)
    equal("".join(chunk.choices[0].text for chunk in chunks), text, "completion stream: text")
    equal(chunks[-1].choices[0].finish_reason, "length", "completion stream: last finish_reason")
    check(all(chunk.usage is None for chunk in chunks), "completion stream: unrequested usage")

    default = client.completions.create(model=model, prompt=PROMPT, temperature=0, extra_body=FIXED)
    check(default.usage.completion_tokens <= 16, f"completion: {default.usage.completion_tokens} tokens by default")

    echoed = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=10, temperature=0, echo=True, extra_body=FIXED
    )
    equal(echoed.choices[0].text, PROMPT + text, "echo")

    several = client.completions.create(
        model=model, prompt=[PROMPT, "Once upon a time"], n=2, max_tokens=10, temperature=0, extra_body=FIXED
    )
    equal([choice.index for choice in several.choices], [0, 1, 2, 3], "several prompts: indices")
    equal([choice.text for choice in several.choices[:2]], [text, text], "several prompts: the first one's texts")
    equal(several.choices[2].text, several.choices[3].text, "several prompts: the second one's texts")
    equal(several.usage.completion_tokens, 40, "several prompts: completion_tokens")
    return text


def stop(client, model, text):
    visible = text.strip()
    check(len(visible) >= 2, f"stop: {text!r} is too short to be cut")
    word = visible[len(visible) // 2 :][:3]
    for stream in (False, True):
        answer = client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=10,
            temperature=0,
            stop=["\x00never\x00", word],
            stream=stream,
            extra_body=FIXED,
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        equal("".join(choice.text for choice in choices), text[: text.index(word)], f"stop at {word!r}, {stream=}")
        equal(choices[-1].finish_reason, "stop", f"stop, {stream=}: finish_reason")


def seeds(client, model):
    def draw(seed):
        answer = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=16, temperature=1.5, n=2, seed=seed, extra_body=FIXED
        )
        equal([choice.index for choice in answer.choices], [0, 1], "n: indices")
        return [choice.text for choice in answer.choices]

    drawn = [draw(seed) for seed in range(4)]
    equal(draw(2), drawn[2], "seed: the same seed again")
    check(len({text for texts in drawn for text in texts}) > 1, f"seed: all texts are equal: {drawn}")
    streamed = {0: "", 1: ""}
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=16, temperature=1.5, n=2, seed=2, stream=True, extra_body=FIXED
    )
    for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    equal([streamed[0], streamed[1]], drawn[2], "seed: streamed")


def logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3, extra_body=FIXED
    )
    content = answer.choices[0].logprobs.content
    equal(len(content), 5, "chat logprobs: tokens")
    for token in content:
        check(token.logprob <= EPSILON, f"chat logprobs: {token.logprob} is no log-probability")
        equal(len(token.top_logprobs), 3, "chat logprobs: alternatives")
        top = [rival.logprob for rival in token.top_logprobs]
        equal(top, sorted(top, reverse=True), "chat logprobs: order of the alternatives")
        equal(token.top_logprobs[0].bytes, token.bytes, "chat logprobs: the greedy token is the most likely one")

    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2, extra_body=FIXED
    )
    lists = answer.choices[0].logprobs
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        equal(len(getattr(lists, name)), 5, f"completion logprobs: {name}")
    check(all(logprob <= EPSILON for logprob in lists.token_logprobs), f"completion logprobs: {lists.token_logprobs}")
    equal(lists.text_offset, sorted(lists.text_offset), "completion logprobs: offsets")

    scored = client.completions.create(model=model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    equal(scored.choices[0].text, PROMPT, "scored prompt: text")
    lists = scored.choices[0].logprobs
    equal(len(lists.tokens), scored.usage.prompt_tokens, "scored prompt: tokens")
    check(lists.token_logprobs[0] is None, "scored prompt: the first token has no log-probability")
    check(all(logprob is not None for logprob in lists.token_logprobs[1:]), "scored prompt: log-probabilities")


def parameters(client, model):
    def ids(choice):
        return choice.model_extra["token_ids"]

    def complete(extra=None, **fields):
        fields = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
        extra = {**FIXED, "return_token_ids": True, **(extra or {})}
        return client.completions.create(**fields, extra_body=extra).choices

    plain = ids(complete()[0])
    equal(len(plain), 8, "token ids")
    equal(ids(complete(logit_bias={"500": 100})[0]), [500] * 8, "logit_bias")
    check(plain[0] not in ids(complete(logit_bias={str(plain[0]): -100})[0]), "logit_bias: forbidden")
    equal(ids(complete({"top_k": 1}, temperature=2, seed=1)[0]), plain, "top_k")
    equal(ids(complete({"min_p": 1}, temperature=2, seed=1)[0]), plain, "min_p")
    equal(ids(complete(temperature=2, top_p=0, seed=1)[0]), plain, "top_p")
    stopped = complete({"stop_token_ids": [plain[4]]})[0]
    equal(ids(stopped), plain[: plain.index(plain[4])], "stop_token_ids")
    equal(stopped.finish_reason, "stop", "stop_token_ids: finish_reason")
    longer = complete({"stop_token_ids": [plain[4]], "min_tokens": 8})[0]
    equal(len(ids(longer)), 8, "min_tokens")
    distinct = ids(complete({"repetition_penalty": 100}, max_tokens=20)[0])
    equal(len(set(distinct)), 20, "repetition_penalty")
    for name in ("presence_penalty", "frequency_penalty"):
        equal(len(ids(complete(**{name: 1.5})[0])), 8, name)
    by_ids = complete(prompt=[5, 6, 7])
    equal([ids(choice) for choice in complete(prompt=[[5, 6, 7], [5, 6, 7]])], [ids(by_ids[0])] * 2, "prompts of ids")

    def converse(**fields):
        return client.chat.completions.create(
            **{"model": model, "max_tokens": 6, "temperature": 0, "messages": MESSAGES, **fields}, extra_body=FIXED
        )

    text = converse().choices[0].message.content
    developer = [{**MESSAGES[0], "role": "developer"}, {"role": "user", "content": "Tell me something."}]
    equal(converse(messages=developer).choices[0].message.content, text, "developer role, content as a string")
    equal([choice.index for choice in converse(n=3, temperature=1, seed=4).choices], [0, 1, 2], "chat: n")
    turns = [*MESSAGES, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "Go on."}]
    check(converse(messages=turns).usage.prompt_tokens > converse().usage.prompt_tokens, "assistant role")

    # The client's own accumulation takes an answer that ends at its length for a failure.
    stream = client.chat.completions.stream(
        model=model, messages=MESSAGES, max_tokens=6, temperature=0, stop=text[-1], extra_body=FIXED
    )
    with stream as events:
        deltas = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    equal(deltas, text[: text.index(text[-1])], "the client's own accumulation: deltas")
    equal(final.choices[0].message.content, deltas, "the client's own accumulation: the whole")
    equal(final.choices[0].finish_reason, "stop", "the client's own accumulation: finish_reason")

    with client.chat.completions.with_streaming_response.create(
        model=model, messages=MESSAGES, max_tokens=6, stream=True
    ) as response:
        equal(response.headers.get("content-type"), "text/event-stream", "stream: content type")
        lines = [line for line in response.iter_lines() if line]
    equal(lines[-1], "data: [DONE]", "stream: last line")


def errors(client, model):
    def complete(**fields):
        return client.completions.create(**{"model": model, "prompt": PROMPT, **fields})

    def converse(**fields):
        return client.chat.completions.create(**{"model": model, "messages": MESSAGES, **fields})

    refused(openai.NotFoundError, lambda: complete(model="no-such-model"), "model", 404, "model", "model_not_found")
    refused(openai.NotFoundError, lambda: client.models.retrieve("no-such-model"), "models", 404, code="model_not_found")
    for name, value in [("temperature", -1), ("top_p", 2), ("n", 0), ("max_tokens", -1), ("presence_penalty", 3)]:
        refused(openai.BadRequestError, lambda: complete(**{name: value}), name, 400, name)
        refused(openai.BadRequestError, lambda: converse(**{name: value}), name, 400, name)
    refused(openai.BadRequestError, lambda: complete(temperature="hot"), "wrong type", 400, "temperature")
    tool = {"type": "function", "function": {"name": "f g", "parameters": {"type": "object", "properties": {}}}}
    refused(openai.BadRequestError, lambda: converse(tools=[tool]), "tools", 400, "tools[0].function.name")
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}
    place = "response_format.json_schema.schema"
    refused(openai.BadRequestError, lambda: converse(response_format=schema), "schema", 400, place)
    refused(openai.BadRequestError, lambda: converse(messages=[]), "no messages", 400, "messages")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    refused(openai.BadRequestError, lambda: converse(messages=image), "image", 400, "messages[0].content[0]")
    refused(
        openai.BadRequestError,
        lambda: complete(max_tokens=10**9),
        "too long",
        400,
        code="context_length_exceeded",
    )


def keys(url, model):
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    refused(openai.AuthenticationError, stranger.models.list, "wrong key", 401, code="invalid_api_key")
    refused(
        openai.AuthenticationError,
        lambda: stranger.completions.create(model=model, prompt=PROMPT),
        "wrong key",
        401,
        code="invalid_api_key",
    )


def embeddings(client, model):
    texts = ["The king", "a", "The king"]
    answer = client.embeddings.create(model=model, input=texts)
    # The client asks for base64 by itself.
    first, other, again = [item.embedding for item in answer.data]
    equal(first, again, "embeddings: equal texts")
    check(first != other and len(first) == len(other) > 1, "embeddings: another text")
    plain = client.embeddings.create(model=model, input=texts[0], encoding_format="float")
    equal([struct.unpack("f", struct.pack("f", item))[0] for item in plain.data[0].embedding], first, "embeddings: float")
    check(answer.usage.prompt_tokens == answer.usage.total_tokens > 2 * plain.usage.prompt_tokens, "embeddings: usage")
    refused(openai.BadRequestError, lambda: client.embeddings.create(model=model, input=[]), "embeddings: none", 400)


def extras(client, model):
    raw = client.completions.with_raw_response.create(
        model=model,
        prompt=PROMPT,
        max_tokens=4,
        temperature=0,
        extra_headers={"X-Request-Id": "check-7"},
        extra_body={**FIXED, "include_figures": True},
    )
    equal(raw.headers.get("x-request-id"), "check-7", "X-Request-Id")
    usage = raw.parse().usage
    figures = (usage.model_extra or {}).get("remoe")
    check(figures is not None, f"include_figures: no figures in {usage}")
    equal(set(figures["experts"]), {"local", "remote", "fallback", "retries"}, "include_figures: experts")
    check(sum(figures["experts"].values()) > 0, f"include_figures: no expert worked: {figures}")
    forwarded = usage.prompt_tokens + usage.completion_tokens - 1
    equal(figures["forwarded_positions"], forwarded, "include_figures: forwarded_positions")
    for name in ("ttft_s", "prefill_s", "decode_s", "queued_s"):
        check(figures[name] >= 0, f"include_figures: {name} is {figures[name]}")


async def side_by_side(url, model, api_key):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client:

        async def one(length):
            stream = await client.chat.completions.create(
                model=model,
                messages=MESSAGES,
                max_tokens=length,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=FIXED,
            )
            usage = None
            async for chunk in stream:
                usage = chunk.usage or usage
            return usage.completion_tokens

        lengths = [3, 9, 5, 7]
        equal(await asyncio.gather(*map(one, lengths)), lengths, "streams side by side: completion_tokens")


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    url, model = sys.argv[1].rstrip("/"), sys.argv[2]
    api_key = sys.argv[3] if len(sys.argv) == 4 else "none"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=120)
    try:
        models(client, model)
        chat(client, model)
        text = completions(client, model)
        stop(client, model, text)
        seeds(client, model)
        parameters(client, model)
        logprobs(client, model)
        errors(client, model)
        embeddings(client, model)
        extras(client, model)
        asyncio.run(side_by_side(url, model, api_key))
        if len(sys.argv) == 4:
            keys(url, model)
    except (AssertionError, openai.OpenAIError) as error:
        sys.exit(f"failed: {type(error).__name__}: {error}")
    print("all checks hold")


if __name__ == "__main__":
    main()
