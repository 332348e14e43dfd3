#!/usr/bin/env python3
"""Print the folder of cargo's intermediate artefacts, for CARGO_BUILD_BUILD_DIR.

It lies in the cache (scripts/cache.py): one for each compiler, lock file and checkout; programs stay at target/. A new one
begins with the dependencies that another checkout, or this one with another lock file, has compiled. Artefacts of this workspace are never shared: cargo tells
those of two checkouts apart by their times alone. What has not been used for longest is removed when all together take
more than REMOE_CACHE_GB (default 30). Where the cache cannot be written, the folder is target/ of this checkout.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import cache

REPOSITORY = Path(__file__).resolve().parent.parent
LARGEST_GB = 30
# What cargo ends the names of a unit's files with.
HASH = re.compile(r"-([0-9a-f]{16})(?:\.|$)")


def packages() -> tuple[list[str], set[str]]:
    """The dependencies from elsewhere, each with version and source, and the names of the workspace's own packages."""
    every = tomllib.loads((REPOSITORY / "Cargo.lock").read_text())["package"]
    foreign = sorted(f"{package['name']} {package['version']} {package['source']}" for package in every if "source" in package)
    return foreign, {package["name"] for package in every if "source" not in package}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


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
    """Keeps the sum below `limit`, those that were used last first, and the very last. Looks once an hour: it takes seconds."""
    stamp = builds / ".pruned"
    if stamp.exists() and time.time() - stamp.stat().st_mtime < 3600:
        return
    stamp.touch()
    folders = sorted((path for path in builds.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for index, folder in enumerate(folders):
        size = disk_use(folder)
        total += size
        if index and total > limit and remove_unused(folder):
            total -= size


def seed(folder: Path, sibling: Path, members: set[str]) -> None:
    """Copies the dependencies of `sibling`: of each profile the units that are not of the workspace's packages."""
    for fingerprints in sibling.glob("*/.fingerprint"):
        profile, target = fingerprints.parent, folder / fingerprints.parent.name
        # A unit has a fingerprint only when its artefacts are complete.
        units = [unit.name for unit in fingerprints.iterdir() if HASH.sub("", unit.name) not in members]
        kept = {match[1] for unit in units if (match := HASH.search(unit))}
        for part in (".fingerprint", "build", "deps"):
            (target / part).mkdir(parents=True, exist_ok=True)
            for entry in (profile / part).iterdir() if (profile / part).exists() else ():
                if (match := HASH.search(entry.name)) and match[1] in kept:
                    copy = shutil.copytree if entry.is_dir() else shutil.copy2
                    copy(entry, target / part / entry.name)


def folder_of_this_checkout(builds: Path) -> Path:
    foreign, members = packages()
    compiler = subprocess.run(["rustc", "-vV"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    # Cargo tells units of other versions apart, so that a new lock file begins with what it has in common with an old one.
    same_compiler = digest(compiler)
    same_lock = f"{same_compiler}-{digest(chr(10).join(foreign).encode())}"
    folder = builds / f"{same_lock}-{digest(os.fsencode(REPOSITORY))}"
    with open(builds / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            siblings = builds.glob(f"{same_compiler}-*")
            siblings = sorted(siblings, key=lambda path: (path.name.startswith(same_lock), path.stat().st_mtime))
            unfinished = builds / f".{folder.name}"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            if siblings:
                seed(unfinished, siblings[-1], members)
            unfinished.rename(folder)
    os.utime(folder)
    return folder


def main() -> None:
    try:
        limit = int(float(os.environ.get("REMOE_CACHE_GB", LARGEST_GB)) * 1e9)
    except ValueError:
        sys.exit(f"invalid REMOE_CACHE_GB={os.environ['REMOE_CACHE_GB']}: expected a number of gigabytes")
    try:
        builds = cache.root() / "build"
        builds.mkdir(parents=True, exist_ok=True)
        folder = folder_of_this_checkout(builds)
        prune(builds, limit)
        print(folder)
    except OSError as error:
        print(f"build cache unavailable: {error}; building in target/", file=sys.stderr)
        print(REPOSITORY / "target")


if __name__ == "__main__":
    main()
