#!/usr/bin/env python3
"""Series of tenants raise no alert of the release: the rules of the chart, as helm renders them, in promtool.

    tests/monitoring/forged.py

Needs promtool (Debian's package prometheus) on PATH, and helm there or among the programs of the test cluster. Without one
of them, says that nothing was tested.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = pathlib.Path(__file__).resolve().with_name("forged-test.yaml")


def main():
    built = subprocess.run([ROOT / "tests/cluster/binaries.py"], capture_output=True, text=True).stdout.strip()
    path = f"{built}:{os.environ['PATH']}" if built else os.environ["PATH"]
    helm, promtool = shutil.which("helm", path=path), shutil.which("promtool", path=path)
    if helm is None or promtool is None:
        missing = "helm" if helm is None else "promtool"
        print(f"monitoring: forged series were NOT TESTED: no {missing} on PATH", file=sys.stderr)
        return
    values = ["prometheusRule.enabled=true", "dashboards.enabled=false"]
    command = [helm, "template", "remoe", ROOT / "charts/remoe", "--namespace", "remoe-system"]
    command += ["--show-only", "templates/dashboards.yaml", *[f"--set={value}" for value in values]]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    groups = rendered.split("\nspec:\n", 1)[1].split("\n---\n", 1)[0]
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        (work / "rules.yaml").write_text("\n".join(line.removeprefix("  ") for line in groups.splitlines()) + "\n")
        shutil.copy(CASES, work / "forged-test.yaml")
        subprocess.run([promtool, "test", "rules", work / "forged-test.yaml"], check=True)


main()
