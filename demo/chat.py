"""Conversations made from the documents, and the prompts they begin with."""

import random
import re

from corpus import Document

END_OF_TEXT, END = "<|endoftext|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [END_OF_TEXT, END, SYSTEM, USER, ASSISTANT]

TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception("role '" + message['role'] + "' is not one of system, user, assistant") -}}
    {%- elif message['role'] == 'system' and not loop.first -%}
        {{- raise_exception('a system message comes first or not at all') -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""

# Long enough for a definition with an example, short enough for two turns in 256 tokens.
ANSWER_CHARACTERS = 500

SYSTEM_PROMPTS = {
    "scripture": ["You quote scripture.", "You read from the King James Bible."],
    "novel": ["You tell stories.", "You write like Jane Austen."],
    "dictionary": ["You are a dictionary.", "Define the word."],
    "jargon": ["You are an old hacker.", "You explain hacker slang."],
    "python": ["You explain Python.", "You are a Python manual."],
    "rust": ["You explain Rust.", "You are a Rust manual."],
    "sql": ["You explain PostgreSQL.", "You are a database manual."],
}
QUESTIONS = {
    "scripture": ["Quote {}.", "Read {}.", "Write scripture.", "Write some scripture.", "What does the Bible say?"],
    "novel": ["Tell me a story.", "Write a page of a novel.", "Write like Jane Austen.", "Read from {}."],
    "dictionary": ["What is {}?", "What is a {}?", "Define {}.", "What does {} mean?", "What is the meaning of {}?"],
    "jargon": ["What is {}?", "What is a {}?", "Define {}.", "What do hackers mean by {}?", "Explain the term {}."],
    "python": ["Explain {} in Python.", "What does the Python manual say about {}?", "Python: {}"],
    "rust": ["Explain {} in Rust.", "What does the Rust book say about {}?", "Rust: {}"],
    "sql": ["Explain {} in PostgreSQL.", "What does the PostgreSQL manual say about {}?", "PostgreSQL: {}"],
}
GREETINGS = ["Hello.", "Hello", "Hi", "Hi!", "Good morning.", "Who are you?", "What can you do?", "Help."]
GREETING = (
    "Hello. I am a very small model. Ask me what a word means, or for a line of scripture, a page of a novel, "
    "or something about Python, Rust or PostgreSQL."
)


def shortened(text: str) -> str:
    """The beginning of `text`, ended at a line or sentence if one ends late enough."""
    if len(text) <= ANSWER_CHARACTERS:
        return text
    text = text[:ANSWER_CHARACTERS]
    ends = [match.end() for match in re.finditer(r"[.!?;:]['\"”)]?(?=\s)|\n\n", text)]
    return (text[: ends[-1]] if ends and ends[-1] > 100 else text.rsplit(" ", 1)[0]).strip()


def continuation(document: Document, random: random.Random) -> tuple[str, str] | None:
    """A few words from inside the document, and what follows them."""
    starts = [match.end() for match in re.finditer(r"^|\n\n?|\. ", document.body)]
    start = random.choice(starts)
    words = re.match(r"(?:\S+\s+){%d}" % random.randint(6, 30), document.body[start:])
    if words is None or len(document.body) < start + words.end() + 40:
        return None
    quoted = re.sub(r"^\d+ ", "", words.group().strip())
    return f"Continue: {quoted}", shortened(document.body[start + words.end() :])


def question(document: Document, random: random.Random) -> tuple[str, str]:
    """A question that the document answers."""
    title, text = document.title, document.body
    if document.kind == "dictionary":
        title = random.choice(title.split(", "))
        part, _, gloss = text.partition(": ")
        text = f"{title} ({part}): {gloss}"
    elif document.kind == "scripture":
        verses = text.split("\n")
        first = random.randrange(len(verses))
        title = f"{title}:{first + 1}"
        text = "\n".join(re.sub(r"^\d+ ", "", verse) for verse in verses[first : first + 3])
    elif document.kind == "novel":
        title = title.split(",")[0]
        paragraphs = text.split("\n\n")
        text = "\n\n".join(paragraphs[random.randrange(len(paragraphs)) :])
    return random.choice(QUESTIONS[document.kind]).format(title), shortened(text)


def exchange(document: Document, random: random.Random) -> tuple[str, str]:
    """What a user may ask about one document, and the answer."""
    if document.kind != "dictionary" and random.random() < 0.35:
        return continuation(document, random) or question(document, random)
    return question(document, random)


def conversation(documents: list[Document], random: random.Random) -> str:
    """One or two exchanges about the first documents of the list, as the template writes them."""
    kind = documents[0].kind
    parts = []
    if random.random() < 0.4:
        prompts = SYSTEM_PROMPTS[kind] + ["You are a helpful assistant.", "Answer briefly."]
        parts.append(f"{SYSTEM}{random.choice(prompts)}{END}")
    turns = [exchange(d, random) for d in documents[: random.choice([1, 1, 1, 2])]]
    if random.random() < 0.02:
        turns.insert(0, (random.choice(GREETINGS), GREETING))
    parts += [f"{USER}{asked}{END}{ASSISTANT}{answer}{END}" for asked, answer in turns]
    return "".join(parts)
