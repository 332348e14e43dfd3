#!/usr/bin/env python3
"""Draw docs/demo.svg: what `make demo` says, as a terminal shows it. Run `make demo-build` first."""

import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, LINE, MARGIN = 112, 20, 20


def drawn(lines: list[str]) -> str:
    width, height = 980, 2 * MARGIN + LINE * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>make demo in a terminal</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#171513"/>',
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13.5" fill="#ece7e0" xml:space="preserve">',
    ]
    for number, line in enumerate(lines, 1):
        colour = ' fill="#f0a470"' if line.startswith(("$", ">")) else ""
        parts.append(f'<text x="{MARGIN}" y="{MARGIN - 6 + LINE * number}"{colour}>{escape(line)}</text>')
    return "\n".join([*parts, "</g>", "</svg>", ""])


def main() -> None:
    demo = subprocess.run([sys.executable, ROOT / "scripts/demo.py"], check=True, capture_output=True, text=True)
    lines = ["$ make demo"]
    for line in demo.stdout.rstrip().splitlines():
        lines += textwrap.wrap(line, COLUMNS) or [""]
    (ROOT / "docs/demo.svg").write_text(drawn(lines))


if __name__ == "__main__":
    main()
