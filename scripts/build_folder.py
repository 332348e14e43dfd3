#!/usr/bin/env python3
"""Print the folder of cargo's intermediate artefacts, for CARGO_BUILD_BUILD_DIR.

It lies in the cache (scripts/cache.py), one for each toolchain and lock file, so that dependencies are compiled once for
all checkouts; programs stay at target/. What has not been used for longest is removed when all together take more than
REMOE_CACHE_GB (default 30). Where the cache cannot be written, the folder is target/ of this checkout.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import cache

REPOSITORY = Path(__file__).resolve().parent.parent
LARGEST_GB = 30


def key() -> str:
    """What artefacts of dependencies depend on: the compiler, and the packages of the lock file that come from elsewhere."""
    compiler = subprocess.run(["rustc", "-vV"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    packages = tomllib.loads((REPOSITORY / "Cargo.lock").read_text())["package"]
    sources = sorted(f"{package['name']} {package['version']} {package['source']}" for package in packages if "source" in package)
    return hashlib.sha256(compiler + "\n".join(sources).encode()).hexdigest()[:12]


def disk_use(folder: Path) -> int:
    """Bytes on disk; files that two names share count once."""
    seen, total = set(), 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_blocks * 512
    return total


def remove_unused(folder: Path) -> bool:
    """Removes a folder unless a cargo holds its lock."""
    locks = []
    try:
        for path in folder.glob("**/.cargo*lock"):
            locks.append(path.open("rb"))
            fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        for lock in locks:
            lock.close()


def prune(builds: Path, limit: int) -> None:
    """Keeps the sum below `limit`, those that were used last first. Looks once an hour: it takes seconds."""
    stamp = builds / ".pruned"
    if stamp.exists() and time.time() - stamp.stat().st_mtime < 3600:
        return
    stamp.touch()
    folders = sorted((path for path in builds.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for folder in folders:
        size = disk_use(folder)
        total += size
        if total > limit and remove_unused(folder):
            total -= size


def main() -> None:
    try:
        limit = int(float(os.environ.get("REMOE_CACHE_GB", LARGEST_GB)) * 1e9)
    except ValueError:
        sys.exit(f"invalid REMOE_CACHE_GB={os.environ['REMOE_CACHE_GB']}: expected a number of gigabytes")
    try:
        builds = cache.root() / "build"
        folder = builds / key()
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        prune(builds, limit)
        folder.mkdir(exist_ok=True)
        print(folder)
    except OSError as error:
        print(f"build cache unavailable: {error}; building in target/", file=sys.stderr)
        print(REPOSITORY / "target")


if __name__ == "__main__":
    main()
