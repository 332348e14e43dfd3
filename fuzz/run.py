#!/usr/bin/env python3
"""Build the fuzz targets, run them, print what they did. See docs/fuzzing.md."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FUZZ = Path(__file__).resolve().parent
TARGET_FOLDER = Path(os.environ.get("CARGO_TARGET_DIR") or FUZZ.parent / "target" / "fuzz").resolve()
FINDINGS = FUZZ / "findings"
# Runs of a long and of a short call; targets that work with files or wide ranges are slower.
RUNS = {
    "folder": (500_000, 10_000), "template": (500_000, 10_000), "listing": (500_000, 10_000),
    "records": (500_000, 10_000), "predictor": (500_000, 10_000), "planning": (500_000, 10_000),
    "gateway_data": (500_000, 10_000), "tenant": (30_000, 1_000),
}
USUAL_RUNS = (2_000_000, 60_000)


def targets() -> list[str]:
    manifest = tomllib.loads((FUZZ / "Cargo.toml").read_text())
    return [binary["name"] for binary in manifest["bin"]]


def build(names: list[str], profile: str) -> Path:
    """The folder of the programs that were built."""
    command = ["cargo", "build", "--locked", "--profile", profile]
    for name in names:
        command += ["--bin", name]
    # The coverage flags stand in fuzz/.cargo/config.toml, which cargo finds from here.
    environment = {key: value for key, value in os.environ.items() if key != "RUSTFLAGS"}
    environment["CARGO_TARGET_DIR"] = str(TARGET_FOLDER)
    status = subprocess.run(command, cwd=FUZZ, env=environment).returncode
    if status:
        sys.exit(status)
    return TARGET_FOLDER / "x86_64-unknown-linux-gnu" / profile


def fuzz(program: Path, options: argparse.Namespace, scratch: Path) -> dict:
    """One target from its seeds (and what earlier long runs found interesting) to its limit."""
    name = program.name
    findings = FINDINGS / name
    findings.mkdir(parents=True, exist_ok=True)
    before = set(findings.iterdir())
    seeds = scratch / "seeds" / name
    environment = {**os.environ, "FUZZ_SCRATCH": str(scratch)}
    subprocess.run([program], env={**environment, "FUZZ_SEEDS": str(seeds)}, check=True, capture_output=True)
    corpus = scratch / "corpus" / name if options.short else TARGET_FOLDER / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    long_runs, short_runs = RUNS.get(name, USUAL_RUNS)
    if options.seconds:
        limit = f"-max_total_time={options.seconds}"
    else:
        limit = f"-runs={short_runs if options.short else options.runs or long_runs}"
    # The first plan of `tenant` takes seconds, and a short call's programs are slower.
    patience = 60 if options.short else 20
    command = [
        program, corpus, seeds, limit, f"-seed={options.seed}", "-max_len=8192", f"-timeout={patience}",
        "-rss_limit_mb=4096", "-print_final_stats=1", f"-artifact_prefix={findings}/",
    ]
    dictionary = FUZZ / "dictionaries" / f"{name}.dict"
    if dictionary.exists():
        command.append(f"-dict={dictionary}")
    log = TARGET_FOLDER / f"{name}.log"
    started = time.monotonic()
    with log.open("wb") as output:
        status = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    text = log.read_text(errors="replace")

    def last(pattern: str) -> int:
        found = re.findall(pattern, text)
        return int(found[-1]) if found else 0

    executions = last(r"stat::number_of_executed_units:\s*(\d+)")
    seconds = time.monotonic() - started
    # A slow unit is a note, not a finding; -timeout says what is too slow.
    new = sorted(path for path in set(findings.iterdir()) - before if not path.name.startswith("slow-unit-"))
    result = {
        "target": name, "executions": executions, "seconds": round(seconds, 1),
        "executions_per_second": round(executions / max(seconds, 0.001)),
        "edges": last(r"cov: (\d+)"), "edges_in_all": last(r"PC tables \((\d+) PCs\)"), "features": last(r"ft: (\d+)"),
        "corpus": last(r"corp: (\d+)"), "peak_mb": last(r"stat::peak_rss_mb:\s*(\d+)"),
        "status": status, "findings": [str(path) for path in new],
    }
    print(
        f"{name:<12}{executions:>12,} runs{result['executions_per_second']:>10,}/s{result['edges']:>8,} of "
        f"{result['edges_in_all']:>7,} edges{result['corpus']:>7,} in corpus{seconds:>8.0f} s"
        + ("" if status == 0 else "   FAILED"),
        flush=True,
    )
    return result


def report(results: list[dict], programs: Path) -> int:
    total = sum(result["executions"] for result in results)
    failed = [result for result in results if result["status"]]
    outcome = "no finding" if not failed else f"{len(failed)} targets failed"
    print(f"{len(results)} targets, {total:,} executions, {outcome}")
    (TARGET_FOLDER / "report.json").write_text(json.dumps({"executions": total, "targets": results}, indent=2) + "\n")
    for result in failed:
        log = TARGET_FOLDER / f"{result['target']}.log"
        lines = log.read_text(errors="replace").splitlines()
        about = [line for line in lines if re.search(r"panicked at|^memory:|ERROR: libFuzzer", line)]
        print(f"\n{result['target']}: {(about or ['see the log'])[0]}\n  log: {log}")
        for path in result["findings"]:
            print(f"  input: {path}\n  again: {programs / result['target']} {path}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a fixed number of runs from the seeds alone")
    parser.add_argument("--runs", type=int, help="runs of each target; without, more than ten million in all")
    parser.add_argument("--seconds", type=int, help="seconds for each target, instead of runs")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers; 0 is another one each time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets that run at the same time")
    parser.add_argument("targets", nargs="*", help="targets, all where none is named")
    options = parser.parse_args()
    names = options.targets or targets()
    if unknown := set(names) - set(targets()):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(targets())}")
    # The short run is over sooner with programs that run slower: the optimiser takes far longer.
    programs = build(names, "short" if options.short else "release")
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="remoe-fuzz-", dir=memory if memory.is_dir() else None))
    try:
        with ThreadPoolExecutor(max(options.jobs or 1, 1)) as pool:
            results = list(pool.map(lambda name: fuzz(programs / name, options, scratch), names))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report(results, programs)


if __name__ == "__main__":
    sys.exit(main())
