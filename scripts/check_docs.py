#!/usr/bin/env python3
"""Check what people read: Markdown (width, links, anchors, words) and the words of the other files.

    scripts/check_docs.py            check
    scripts/check_docs.py --shrink   take files that pass from scripts/unconverted.txt

The style is that of CONTRIBUTING.md. Files in scripts/unconverted.txt are not checked for words yet; the list may only shrink:
one that passes must leave it. Uses nothing but the standard library.
"""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
UNCONVERTED = ROOT / "scripts" / "unconverted.txt"
# A template of demo/model/README.md, beside which its pictures are.
TEMPLATE = ROOT / "demo" / "card.md"
WIDTH = 100
# Words that say who does not do something instead of what does it, and dialect.
BANNED = re.compile(r"\b(nobody|somebody|whoever|anew)\b", re.IGNORECASE)
# The value of a chart setting that users already depend on.
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")
OPENING = re.compile(r"^\s*//[/!] (What|Who|Whoever|Whether|Those|Its|Of|None|The same)\b")
# As the project spells them: British, and one form of each term.
SPELLING = {
    r"\bbehavior": "behaviour", r"\bcolor\b": "colour", r"\boptimiz": "optimis", r"\bquantiz": "quantis",
    r"\bkv-cache\b": "KV cache", r"\bback-pressure\b": "backpressure", r"\bscale-to-zero\b": "scale to zero",
    r"\bcold-start\b": "cold start", r"\bcanceled\b": "cancelled", r"\bartifact": "artefact",
}  # fmt: skip
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return [ROOT / name for name in sorted(set(names)) if (ROOT / name).exists()]


def prose(text: str) -> list[tuple[int, str]]:
    """The numbered lines outside of code blocks."""
    lines, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            lines.append((number, line))
    return lines


def anchors(path: Path) -> set[str]:
    """What a link to a heading may name, as GitHub makes it, and explicit ones."""
    found: dict[str, int] = {}
    names = set()
    text = path.read_text()
    for _, line in prose(text):
        if heading := re.match(r"#+ +(.*?) *#*$", line):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            names.add(name if name not in found else f"{name}-{found[name]}")
            found[name] = found.get(name, 0) + 1
    return names | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def markdown(path: Path) -> list[str]:
    """Links and anchors."""
    faults = []
    for number, line in prose(path.read_text()):
        for target in LINK.findall(CODE.sub("", line)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = unquote(target).partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists():
                faults.append(f"{number}: broken link to {target}")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                faults.append(f"{number}: broken anchor {target}")
    return faults


def words(path: Path) -> list[str]:
    """Banned words; in Markdown also width and spellings, in Rust the openings of doc comments."""
    faults = []
    text = path.read_text(errors="replace")
    lines = prose(text) if path.suffix == ".md" else enumerate(text.splitlines(), 1)
    for number, line in lines:
        plain = QUOTED.sub("", line) if path.suffix == ".md" else line.replace("alias = \"nobody\"", "")
        if found := BANNED.search(plain):
            faults.append(f"{number}: the word {found[0]!r}: name the actor, or say what does happen")
        if path.suffix == ".rs" and (found := OPENING.match(line)):
            faults.append(f"{number}: a doc comment that begins with {found[1]!r}: begin with a verb or a noun")
        if path.suffix == ".md":
            if found := re.search(r"@@\w+@@", line):
                faults.append(f"{number}: {found[0]} is to be filled in")
            is_exempt = line.lstrip().startswith("|") or "](" in line or "<" in line or "http" in line
            if len(line) > WIDTH and not is_exempt:
                faults.append(f"{number}: {len(line)} characters, at most {WIDTH}")
            for wrong, right in SPELLING.items():
                if found := re.search(wrong, CODE.sub("", LINK.sub("", line)), re.IGNORECASE):
                    faults.append(f"{number}: {found[0]!r} is spelt {right!r} here")
    return faults


def main() -> int:
    unconverted = set(UNCONVERTED.read_text().split()) if UNCONVERTED.exists() else set()
    faults, passed = [], set()
    for path in tracked("*.md"):
        if path != TEMPLATE and "evaluation" not in path.parts:
            faults += [f"{path.relative_to(ROOT)}:{fault}" for fault in markdown(path)]
    for path in tracked("*.md", "*.rs", "*.py", "*.yaml", "*.js", "*.html", "*.txt", "*.tpl"):
        name = str(path.relative_to(ROOT))
        if path == Path(__file__).resolve() or "fixtures" in path.parts or name.startswith(("demo/model/", "docs/evaluation/")):
            continue
        found = words(path)
        if name in unconverted:
            if not found:
                passed.add(name)
            continue
        faults += [f"{name}:{fault}" for fault in found]
    gone = {name for name in unconverted if not (ROOT / name).exists()}
    if sys.argv[1:] == ["--shrink"]:
        UNCONVERTED.write_text("".join(f"{name}\n" for name in sorted(unconverted - passed - gone)))
    elif passed or gone:
        faults += [f"scripts/unconverted.txt: {name} is converted or gone: scripts/check_docs.py --shrink" for name in sorted(passed | gone)]
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{len(faults)} faults; {len(unconverted - passed - gone)} files are not converted yet")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
