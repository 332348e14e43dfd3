#!/usr/bin/env python3
"""Has Grafana's dashboard-linter look at every dashboard, strictly; what it is to let pass stands in .lint beside this.

    tests/monitoring/lint.py

The linter is the one that REMOE_DASHBOARD_LINTER names, else the one on PATH, else it is built once by Go. Where none of
this can be, that is said, and nothing was looked at.
"""

import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
DASHBOARDS = HERE.parents[1] / "charts/remoe/files/dashboards"
MODULE = "github.com/grafana/dashboard-linter"
VERSION = "v0.1.1"
SETTING = "REMOE_DASHBOARD_LINTER"
BUILD_DEADLINE_S = 1800


def cache():
    if chosen := os.environ.get("REMOE_CACHE"):
        return pathlib.Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "remoe"


def linter():
    """The program; none where there is none and it cannot be built, with the reason."""
    if given := os.environ.get(SETTING):
        if not os.access(given, os.X_OK):
            sys.exit(f"{SETTING}={given} is no program")
        return given, None
    if found := shutil.which("dashboard-linter"):
        return found, None
    folder = cache() / f"dashboard-linter-{VERSION}"
    built = folder / "dashboard-linter"
    if os.access(built, os.X_OK):
        return built, None
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        return None, "there is no Go to build it"
    print(f"monitoring: building dashboard-linter {VERSION} (some minutes, once)", file=sys.stderr, flush=True)
    environment = os.environ | {"GOBIN": str(folder), "GOFLAGS": "-mod=mod"}
    try:
        done = subprocess.run([go, "install", f"{MODULE}@{VERSION}"], env=environment, capture_output=True, text=True, timeout=BUILD_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return None, f"Go did not build {MODULE}@{VERSION} in {BUILD_DEADLINE_S} s"
    if done.returncode != 0:
        return None, f"Go could not build {MODULE}@{VERSION}: {' '.join(done.stderr.split())[:300]}"
    return built, None


def main():
    program, why = linter()
    if program is None:
        print(f"monitoring: the dashboards were NOT LINTED: {why}; set {SETTING} to a dashboard-linter", file=sys.stderr)
        return
    failed = []
    dashboards = sorted(DASHBOARDS.glob("*.json"))
    for path in dashboards:
        done = subprocess.run([program, "lint", "--strict", "--config", HERE / ".lint", path], capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            failed.append(path.name)
            print(done.stdout + done.stderr, file=sys.stderr)
    if failed:
        sys.exit(f"dashboard-linter found faults in {', '.join(failed)}")
    print(f"{len(dashboards)} dashboards linted")


main()
