"""The snippets of docs/clients.md: which there are, and how each is run as it stands there."""

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs/clients.md"
# The server that the page names.
SERVER = "http://127.0.0.1:8000"
MARK = re.compile(r"<!-- run: (sh|python|node)(?: ([a-z-]+))? -->")
FENCES = {"sh": "sh", "python": "python", "node": "js"}
# Sections of applications with a window, and the languages of blocks that are only read.
UNTRIED, READ = {"Open WebUI", "Continue"}, {"console"}


@dataclass
class Snippet:
    section: str
    language: str
    # Packages beside those that all clients share.
    packages: str | None
    text: str


def snippets() -> list[Snippet]:
    """All that are run. A block without a mark is an error where it is not one that is only read."""
    found, section, mark, block = [], "", None, None
    for line in PAGE.read_text().splitlines():
        if block is not None:
            if line != "```":
                block.append(line)
                continue
            if mark:
                found.append(Snippet(section, mark[1], mark[2], "\n".join(block) + "\n"))
            mark = block = None
        elif line.startswith("```"):
            fence = line.removeprefix("```")
            if mark and FENCES[mark[1]] != fence:
                raise AssertionError(f"docs/clients.md: {section}: a block of {fence} is marked as {mark[1]}")
            if not mark and fence not in READ and section not in UNTRIED:
                raise AssertionError(f"docs/clients.md: {section}: a block of {fence} without a mark is never run")
            block = []
        elif line.startswith("## "):
            section = line.removeprefix("## ")
        elif marked := MARK.fullmatch(line):
            mark = marked
    return found


def names() -> list[str]:
    """Names of the sections with snippets, for the command line."""
    sections = dict.fromkeys(snippet.section for snippet in snippets())
    return [name(section) for section in sections]


def name(section: str) -> str:
    return "page-" + section.lower().replace(" ", "-")


def run(snippet: Snippet, endpoint: str, environment: dict[str, str], node_packages: Path) -> None:
    """Runs a snippet in a folder of its own, against `endpoint` in place of the page's server."""
    text = snippet.text.replace(SERVER, endpoint)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copytree(HERE / "tasks", folder / "tasks")
        (folder / "demo").symlink_to(ROOT / "demo")
        if snippet.language == "node":
            (folder / "node_modules").symlink_to(node_packages)
            (folder / "snippet.mjs").write_text(text)
            command = ["node", "snippet.mjs"]
        elif snippet.language == "python":
            command = ["python3", "-c", text]
        else:
            command = ["bash", "-euo", "pipefail", "-c", text]
        environment = environment | {"HOME": scratch, "LLM_USER_PATH": scratch}
        ended = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
    if ended.returncode or not ended.stdout.strip() or '"error"' in ended.stdout:
        raise AssertionError(f"{snippet.section}: ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
