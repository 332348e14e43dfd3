#!/usr/bin/env python3
"""Clients that people use, against `remoe up` with the demo model: curl, OpenAI's and Anthropic's SDKs for Python and
JavaScript, litellm, langchain-openai and llm. Agents also: LangChain, instructor, LlamaIndex and Vercel's `ai`.

    make clients                          # or: tests/clients/run.py [NAME..]

The snippets of docs/clients.md are run as they stand there: names that begin with `page-`, one for each section.
Each client gets the same questions: which models there are, an answer, the same answer as a stream, and a refusal. Those
that speak the Responses API or Anthropic's also call a tool, get a structured answer and go on with a conversation.
Agents do so with a model that thinks: the demo model with thinking.jinja, which opens a thought in every answer.
What is installed goes into target/. A client that cannot be installed here is skipped, loudly, and named at the end.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import page

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
# Those of the tests, which `make` installs, and llm's.
SHARED, PYTHON, NODE = ROOT / "target/python", ROOT / "target/clients", ROOT / "target/node"
AGENTS, THINKING = ROOT / "target/agents", ROOT / "target/thinking-model"
MODEL = "remoe-demo"
PROMPT = "What is a lake?"
FIXED = {"max_tokens": 24, "seed": 1}
# Arguments and answers that the smallest model gets right within few tokens.
WORD = {
    "type": "object",
    "properties": {"word": {"type": "string", "enum": ["lake", "river"]}},
    "required": ["word"],
    "additionalProperties": False,
}


# Frameworks that need different versions of the same packages: each has a folder of its own.
FRAMEWORKS = {
    "langchain": ["langchain==1.5.2", "langchain-openai==1.7.4"],
    "instructor": ["instructor==1.17.0"],
    "aider": ["aider-chat==0.86.2"],
    "lm-eval": ["lm-eval[api]==0.4.13", "transformers==5.24.0"],
    "llamaindex": ["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"],
}


class Skipped(Exception):
    """The client cannot be had on this machine."""


def equal(got, expected, what):
    if got != expected:
        raise AssertionError(f"{what}: got {got!r}, expected {expected!r}")


def refused(call, errors, what):
    try:
        call()
    except errors as error:
        return error
    raise AssertionError(f"{what} was not refused")


def package(name):
    """The Python package `name`, installed with the others where it is not there."""
    for folder in map(str, (SHARED, PYTHON)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"pip could not install it: {error}") from error


def install_python():
    if not (PYTHON / "anthropic").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", PYTHON, "--requirement", HERE / "requirements.txt"], check=False)


def run(command, **options):
    # llm would read a prompt from an open standard input.
    none = subprocess.DEVNULL
    ended = subprocess.run(command, stdin=none, capture_output=True, text=True, timeout=300, **options)
    if ended.returncode:
        raise AssertionError(f"{command[0]} ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
    return ended.stdout


def curl(endpoint):
    if not shutil.which("curl"):
        raise Skipped("there is no curl")
    ask = ["curl", "--silent", "--show-error", "--max-time", "60"]
    equal([model["id"] for model in json.loads(run([*ask, f"{endpoint}/v1/models"]))["data"]], [MODEL], "models")
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], **FIXED}

    def post(fields, *more):
        data = ["--json", json.dumps(body | fields), *more]
        return run([*ask, *data, f"{endpoint}/v1/chat/completions"])

    text = json.loads(post({}))["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in post({"stream": True}, "--no-buffer").splitlines() if line]
    equal(events.pop(), "[DONE]", "the end of a stream")
    deltas = [choice["delta"].get("content", "") for event in events for choice in json.loads(event)["choices"]]
    equal("".join(deltas), text, "a stream")
    status = post({"model": "another"}, "--output", os.devnull, "--write-out", "%{http_code}")
    equal(status, "404", "another model")


def openai(endpoint):
    library = package("openai")
    client = library.OpenAI(base_url=f"{endpoint}/v1", api_key="none")
    equal([model.id for model in client.models.list()], [MODEL], "models")
    ask = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], **FIXED}
    text = client.chat.completions.create(**ask).choices[0].message.content
    chunks = client.chat.completions.create(**ask, stream=True)
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), text, "a stream")
    refused(lambda: client.chat.completions.create(**ask | {"model": "another"}), library.NotFoundError, "another model")


def responses(endpoint):
    library = package("openai")
    client = library.OpenAI(base_url=f"{endpoint}/v1", api_key="none")
    ask = {"model": MODEL, "input": PROMPT, "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**ask)
    equal((whole.status, whole.incomplete_details.reason), ("incomplete", "max_output_tokens"), "the end of an answer")
    equal(whole.usage.total_tokens, whole.usage.input_tokens + whole.usage.output_tokens, "usage")
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    equal((deltas, events[-1].response.output_text), (whole.output_text, whole.output_text), "a stream")
    equal([event.sequence_number for event in events], list(range(len(events))), "sequence numbers")

    stored = client.responses.retrieve(whole.id)
    equal(stored.output_text, whole.output_text, "a stored response")
    on = client.responses.create(**ask | {"input": "Why?"}, previous_response_id=whole.id)
    equal(on.previous_response_id, whole.id, "the response that it goes on from")
    items = [{"role": "user", "content": PROMPT}, *whole.output, {"role": "user", "content": "Why?"}]
    itself = client.responses.create(**ask | {"input": items}, store=False)
    equal(on.output_text, itself.output_text, "a conversation with stored items, or with all of them sent")
    refused(lambda: client.responses.retrieve(itself.id), library.NotFoundError, "a response that was not stored")
    client.responses.delete(whole.id)
    again = {**ask, "previous_response_id": whole.id}
    refused(lambda: client.responses.create(**again), library.NotFoundError, "a response that was deleted")

    tool = {"type": "function", "name": "find", "strict": True, "parameters": WORD, "description": "Finds a word."}
    required = {**ask, "max_output_tokens": 200, "tools": [tool], "tool_choice": "required"}
    required["parallel_tool_calls"] = False
    called = client.responses.create(**required)
    call = next(item for item in called.output if item.type == "function_call")
    equal((call.name, list(json.loads(call.arguments))), ("find", ["word"]), "a call")
    with client.responses.stream(**required) as stream:
        events = list(stream)
    streamed = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    equal(streamed, call.arguments, "a call in a stream")
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is a lake."}]
    answer = client.responses.create(**ask | {"input": result}, tools=[tool], previous_response_id=called.id)
    equal(answer.error, None, "an answer after a call")
    form = {"format": {"type": "json_schema", "name": "word", "strict": True, "schema": WORD}}
    formed = client.responses.create(**ask | {"max_output_tokens": 200}, text=form)
    equal(list(json.loads(formed.output_text)), ["word"], "a structured answer")
    search = {**ask, "tools": [{"type": "web_search"}]}
    equal(refused(lambda: client.responses.create(**search), library.BadRequestError, "a tool").param, "tools[0].type", "a refusal")


def anthropic(endpoint):
    library = package("anthropic")
    client = library.Anthropic(base_url=endpoint, api_key="none")
    said = [{"role": "user", "content": PROMPT}]
    ask = {"model": MODEL, "messages": said, "max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask, thinking={"type": "disabled"})
    text = whole.content[0].text
    equal((whole.stop_reason, whole.usage.output_tokens), ("max_tokens", 8), "the end of an answer")
    with client.messages.stream(**ask) as stream:
        equal("".join(stream.text_stream), text, "a stream")
        final = stream.get_final_message()
    equal((final.content[0].text, final.stop_reason), (text, "max_tokens"), "the message of a stream")
    count = client.messages.count_tokens(model=MODEL, messages=said).input_tokens
    equal(count, whole.usage.input_tokens + whole.usage.cache_read_input_tokens, "the number of tokens")
    stopped = client.messages.create(**ask, stop_sequences=[text[4:8]])
    equal((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", text[4:8]), "a stop sequence")

    tool = {"name": "find", "description": "Finds a word.", "input_schema": WORD}
    required = {**ask, "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    called = client.messages.create(**required)
    use = next(block for block in called.content if block.type == "tool_use")
    equal((called.stop_reason, use.name, list(use.input)), ("tool_use", "find", ["word"]), "a call")
    with client.messages.stream(**required) as stream:
        streamed = stream.get_final_message()
    equal(next(block for block in streamed.content if block.type == "tool_use").input, use.input, "a call in a stream")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "It is a lake."}
    turns = [*said, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    equal(client.messages.create(**ask | {"messages": turns}, tools=[tool]).role, "assistant", "an answer after a call")
    refused(lambda: client.messages.create(**ask | {"model": "another"}), library.NotFoundError, "another model")
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}]}]
    error = refused(lambda: client.messages.create(**ask | {"messages": image}), library.BadRequestError, "an image")
    equal(error.body["error"]["type"], "invalid_request_error", "the type of an error")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    refused(lambda: client.messages.create(**ask, thinking=thinking), library.BadRequestError, "a model's missing thought")


def node_packages():
    """The folder of Node's packages."""
    if not shutil.which("npm"):
        raise Skipped("there is no npm")
    packages = json.loads((HERE / "package.json").read_text())["dependencies"]
    if not all((NODE / "node_modules" / name).is_dir() for name in packages):
        NODE.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "package.json", NODE)
        try:
            run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=NODE)
        except AssertionError as error:
            raise Skipped(f"npm could not install it: {error}") from error
    return NODE / "node_modules"


def node(script, endpoint):
    node_packages()
    run(["node", HERE / script, endpoint, MODEL], cwd=ROOT)


def openai_js(endpoint):
    node("openai.mjs", endpoint)


def responses_js(endpoint):
    node("responses.mjs", endpoint)


def anthropic_js(endpoint):
    node("anthropic.mjs", endpoint)


def litellm(endpoint):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Else it asks for prices on the net.
    library = package("litellm")
    ask = {"model": f"openai/{MODEL}", "api_base": f"{endpoint}/v1", "api_key": "none", **FIXED}
    ask["messages"] = [{"role": "user", "content": PROMPT}]
    text = library.completion(**ask).choices[0].message.content
    chunks = library.completion(**ask, stream=True)
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), text, "a stream")
    refused(lambda: library.completion(**ask | {"model": "openai/another"}), library.NotFoundError, "another model")


def langchain(endpoint):
    library = package("langchain_openai")
    ask = {"base_url": f"{endpoint}/v1", "api_key": "none", "max_tokens": FIXED["max_tokens"], "seed": FIXED["seed"]}
    chat = library.ChatOpenAI(model=MODEL, **ask)
    answer = chat.invoke([("user", PROMPT)])
    if not answer.content or answer.usage_metadata["output_tokens"] < 1:
        raise AssertionError(f"no answer: {answer}")
    equal("".join(chunk.content for chunk in chat.stream([("user", PROMPT)])), answer.content, "a stream")
    other = library.ChatOpenAI(model="another", **ask)
    refused(lambda: other.invoke(PROMPT), package("openai").NotFoundError, "another model")


def llm(endpoint):
    package("llm")
    folder = ROOT / "target/llm"
    folder.mkdir(parents=True, exist_ok=True)
    entry = f"- model_id: remoe\n  model_name: {MODEL}\n  api_base: {endpoint}/v1\n  api_key_name: none\n"
    (folder / "extra-openai-models.yaml").write_text(entry)
    environment = os.environ | {"PYTHONPATH": f"{PYTHON}{os.pathsep}{SHARED}", "LLM_USER_PATH": str(folder)}
    ask = [sys.executable, "-m", "llm", "prompt", "--model", "remoe", "--key", "none", "--no-log"]
    ask += ["-o", "max_tokens", str(FIXED["max_tokens"]), "-o", "seed", str(FIXED["seed"]), PROMPT]
    text = run([*ask, "--no-stream"], env=environment)
    if not text.strip():
        raise AssertionError("no answer")
    equal(run(ask, env=environment), text, "a stream")


def thoughts(endpoint):
    said = [{"role": "user", "content": PROMPT}]
    client = package("openai").OpenAI(base_url=f"{endpoint}/v1", api_key="none")
    ask = {"model": MODEL, "input": said, "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**ask)
    equal([item.type for item in whole.output], ["reasoning"], "a thought that does not end")
    equal(whole.usage.output_tokens_details.reasoning_tokens, 8, "tokens of a thought")
    thought = whole.output[0].content[0].text
    with client.responses.stream(**ask) as stream:
        deltas = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
    equal("".join(deltas), thought, "a response's thought in a stream")
    on = client.responses.create(**ask | {"input": [*said, *whole.output, *said]})
    equal(on.error, None, "an answer after a thought")

    client = package("anthropic").Anthropic(base_url=endpoint, api_key="none")
    ask = {"model": MODEL, "messages": said, "max_tokens": 200, "extra_body": {"temperature": 0}}
    ask["thinking"] = {"type": "enabled", "budget_tokens": 16}
    tools = {"tools": [{"name": "find", "description": "Finds a word.", "input_schema": WORD}]}
    required = {**ask, **tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    called = client.messages.create(**required)
    equal([block.type for block in called.content], ["thinking", "tool_use"], "a call after a thought")
    with client.messages.stream(**required) as stream:
        deltas = [event.thinking for event in stream if event.type == "thinking"]
    equal("".join(deltas), called.content[0].thinking, "a message's thought in a stream")
    result = {"type": "tool_result", "tool_use_id": called.content[1].id, "content": "It is a lake."}
    turns = [*said, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    form = {"output_config": {"format": {"type": "json_schema", "schema": WORD}}}
    formed = client.messages.create(**ask | {"messages": turns}, **form)
    thought, text = formed.content
    equal((thought.type, list(json.loads(text.text))), ("thinking", ["word"]), "a structured answer after a thought")
    silent = client.messages.create(**ask | {"thinking": {"type": "disabled"}}, **form)
    equal([block.type for block in silent.content], ["text"], "an answer without a thought")


def framework_packages(name):
    """The folder of a framework's packages."""
    folder, pins = AGENTS / name, FRAMEWORKS[name]
    complete = folder / ".complete"
    if not complete.is_file() or complete.read_text().split() != pins:
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
        if subprocess.run([*pip, *pins], check=False).returncode:
            raise Skipped("pip could not install it")
        complete.write_text("\n".join(pins))
    return folder


def framework(name, endpoint):
    environment = os.environ | {"PYTHONPATH": str(framework_packages(name))}
    run([sys.executable, HERE / "agents.py", name, endpoint, MODEL], env=environment)


def snippets(section):
    """Runs the snippets of a section of docs/clients.md."""

    def client(endpoint):
        for snippet in (it for it in page.snippets() if page.name(it.section) == section):
            folders = [framework_packages(snippet.packages)] if snippet.packages in FRAMEWORKS else [PYTHON, SHARED]
            path = [*(str(folder / "bin") for folder in folders), os.environ["PATH"]]
            environment = os.environ | {
                "PATH": os.pathsep.join(path),
                "PYTHONPATH": os.pathsep.join(map(str, folders)),
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "HF_HUB_OFFLINE": "1",
                # Else it looks on the net, and opens a browser.
                "AIDER_CHECK_UPDATE": "false",
                "AIDER_SHOW_RELEASE_NOTES": "false",
                "OPENAI_API_KEY": "none",
            }
            modules = node_packages() if snippet.language == "node" else NODE
            page.run(snippet, endpoint, environment, modules)

    return client


def langchain_agent(endpoint):
    framework("langchain", endpoint)


def instructor(endpoint):
    framework("instructor", endpoint)


def llamaindex(endpoint):
    framework("llamaindex", endpoint)


def ai_js(endpoint):
    node("agents.mjs", endpoint)


def thinking_model():
    """The demo model's folder with a template that opens a thought."""
    shutil.rmtree(THINKING, ignore_errors=True)
    THINKING.mkdir(parents=True)
    for file in (ROOT / "demo/model").iterdir():
        if file.suffix in (".json", ".safetensors"):
            (THINKING / file.name).symlink_to(file)
    shutil.copy(HERE / "thinking.jinja", THINKING / "chat_template.jinja")
    return THINKING


CLIENTS = {
    "curl": curl,
    "openai": openai,
    "openai-js": openai_js,
    "responses": responses,
    "responses-js": responses_js,
    "anthropic": anthropic,
    "anthropic-js": anthropic_js,
    "litellm": litellm,
    "langchain": langchain,
    "llm": llm,
    **{name: snippets(name) for name in page.names()},
}
# Those that drive a model that thinks.
AGENT_CLIENTS = {
    "thoughts": thoughts,
    "langchain-agent": langchain_agent,
    "instructor": instructor,
    "llamaindex": llamaindex,
    "ai-js": ai_js,
}


def drive(model, clients, failed, skipped):
    """Runs `clients` against an endpoint that serves `model`, and adds the names of those that failed or were skipped."""
    programs = Path(os.environ.get("REMOE_BIN_DIR", ROOT / "target/release"))
    command = [programs / "remoe", "up", model, "--served-model-name", MODEL]
    command += ["--remote-ratio", "0.5", "--port", "0", "--state", ROOT / "target/state", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        endpoint = json.loads(process.stdout.readline())["endpoint"]
        for name, client in clients.items():
            try:
                client(endpoint)
                print(f"clients: {name} ok", flush=True)
            except Skipped as why:
                skipped.append(name)
                print(f"clients: {name} WAS NOT TRIED: {why}", flush=True)
            except Exception as error:  # noqa: BLE001 - every client has errors of its own
                failed.append(name)
                print(f"clients: {name} FAILED: {type(error).__name__}: {error}", flush=True)
    finally:
        process.terminate()
        process.wait(timeout=60)


def main():
    every = CLIENTS | AGENT_CLIENTS
    wanted = sys.argv[1:] or list(every)
    if unknown := set(wanted) - set(every):
        sys.exit(f"clients: there is no {', '.join(unknown)}; there are {', '.join(every)}")
    without = {"curl", "page-curl", "langchain-agent", "instructor", "llamaindex"}
    if any(name not in without and not name.endswith("-js") for name in wanted):
        install_python()
    failed, skipped = [], []
    for table, model in ((CLIENTS, lambda: ROOT / "demo/model"), (AGENT_CLIENTS, thinking_model)):
        if chosen := {name: table[name] for name in wanted if name in table}:
            drive(model(), chosen, failed, skipped)
    if skipped:
        print(f"clients: NOT TRIED: {', '.join(skipped)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
