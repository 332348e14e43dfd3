#!/usr/bin/env python3
"""Count the tests of each crate at two revisions: scripts/test_counts.py OLD [NEW], NEW being the working tree.

Counts the functions that bear a test attribute, also inside of `proptest!`. Exits with 1 if a crate has fewer than before.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST = re.compile(r"^\s*#\[(?:tokio::)?test\b", re.MULTILINE)
# Packages below the folder of another one.
NESTED = ("tests/e2e", "main-model-fn/main-model-torch")


def crate_of(path: str) -> str:
    """The folder that stands for the crate: the tests of a crate were once packages of their own below it."""
    return next((folder for folder in NESTED if path.startswith(folder + "/")), "/".join(path.split("/")[: 2 if path.startswith("crates/") else 1]))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def counts(revision: str | None) -> Counter[str]:
    found: Counter[str] = Counter()
    if revision is None:
        names = git("ls-files", "--cached", "--others", "--exclude-standard", "*.rs").splitlines()
        for name in names:
            if (path := ROOT / name).exists():
                found[crate_of(name)] += len(TEST.findall(path.read_text()))
        return found
    for line in git("grep", "--count", "-E", r"^\s*#\[(tokio::)?test\b", revision, "--", "*.rs").splitlines():
        _, name, count = line.rsplit(":", 2)
        found[crate_of(name)] += int(count)
    return found


def main() -> int:
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    old, new = counts(sys.argv[1]), counts(sys.argv[2] if len(sys.argv) == 3 else None)
    crates = sorted(name for name in old.keys() | new.keys() if old[name] or new[name])
    for crate in crates:
        print(f"{crate:<20}{old[crate]:>6}{new[crate]:>6}{'   FEWER' if new[crate] < old[crate] else ''}")
    print(f"{'all':<20}{old.total():>6}{new.total():>6}")
    return int(any(new[crate] < old[crate] for crate in crates))


if __name__ == "__main__":
    sys.exit(main())
