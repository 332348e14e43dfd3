#!/usr/bin/env python3
"""A real Prometheus looks at a real `remoe up` under load: rules are checked, and every expression of every
dashboard and rule is evaluated and must return data.

    tests/monitoring/check.py [--pictures DIR] [--seconds N]

Needs `prometheus` and `promtool` (Debian's package prometheus) on PATH, and the programs of `make build`. With
--pictures each dashboard is drawn from its own queries by Chromium, where Grafana is not at hand.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import render

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = pathlib.Path(os.environ.get("REMOE_BIN_DIR", ROOT / "target/release"))
KEYS = """tenants:
- {name: search, keys: [sk-search], dollarsPerDay: 0.0001}
- {name: chat, keys: [sk-chat]}
- {name: batch, keys: [sk-batch], dollarsPerDay: 0.00000001}
"""
# Of both topics of the demo model, which uses other experts for each.
PROMPTS = (
    "And the LORD spake unto Moses, saying, Speak unto the children of Israel, and say unto them",
    "impl<T> Vec<T> {\n    pub fn push(&mut self, value: T) {\n        if self.len == self.buf.capacity() {",
    "Blessed is the man that walketh not in the counsel of the ungodly, nor standeth in the way of sinners",
    "use std::collections::HashMap;\n\nfn main() {\n    let mut map = HashMap::new();\n    map.insert(\"key\", 1);",
    "Now these are the names of the children of Israel, which came into Egypt; every man and his household",
)
# What a dashboard's variables stand for here, beside the model.
VARIABLES = {"$job": ".+", "$__range": "60s"}
# Only on a cluster.
ELSEWHERE = ("remoe_operator_",)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def get(url, **parameters):
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(url + query, timeout=20) as answer:
        return json.load(answer)


@contextlib.contextmanager
def program(arguments, **options):
    """A process that has ended when this is left."""
    process = subprocess.Popen(arguments, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def load(endpoint, key, stop, pause, failures):
    """Asks again and again, until `stop`, but not while there is a `pause`."""
    number = 0
    while not stop.is_set():
        if pause.is_set():
            stop.wait(0.1)
            continue
        number += 1
        prompt = PROMPTS[number % len(PROMPTS)]
        body = {"prompt": prompt, "max_tokens": 8 + number % 17, "ignore_eos": True}
        body["stream"] = number % 2 == 0
        request = urllib.request.Request(
            f"{endpoint}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        try:
            urllib.request.urlopen(request, timeout=30).read()
        except urllib.error.HTTPError as error:
            # A budget that is spent is part of the picture.
            if error.code != 429:
                failures.append(f"{key}: {error}")
            stop.wait(1)
        except OSError as error:
            failures.append(f"{key}: {error}")
        stop.wait(0.05)


def expressions(folder):
    """Every expression, with the place where it stands."""
    for path in sorted((folder / "grafana/dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]
        for annotation in dashboard["annotations"]["list"]:
            # Nothing but the moments in which it is true: what is looked at must be there.
            yield f"{path.name}: {annotation['name']}", annotation["expr"].split(" > ")[0]
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                metric = re.match(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                yield f"{path.name}: variable {variable['name']}", f"count by ({metric[2]}) ({metric[1]})"
    for path in sorted((ROOT / "charts/remoe/files/rules").glob("*.yaml")):
        for line in path.read_text().splitlines():
            if found := re.match(r"\s+expr: (.*)", line):
                # An alert is a recorded series and its limit: the series must be there.
                alert = re.match(r"(remoe:[\w:]+) > [\d.]+", found[1])
                yield f"rules/{path.name}", alert[1] if alert else found[1]


def neglected():
    """Alerts that no test is about, or that have no page."""
    rules = (ROOT / "charts/remoe/files/rules/remoe.yaml").read_text()
    tested = set(re.findall(r"alertname: (\w+)\n", (ROOT / "tests/monitoring/rules-test.yaml").read_text()))
    for alert in re.split(r"- alert: ", rules)[1:]:
        name, page = alert.split()[0], re.search(r"runbook_url: \S+/(docs/runbooks/\S+)", alert)
        if name not in tested:
            yield f"{name}: no test has it fire"
        if not page or not (ROOT / page[1]).is_file():
            yield f"{name}: it has no page in docs/runbooks"


def substituted(expression, model, interval=15):
    for name, value in (VARIABLES | {"$model": model, "$__rate_interval": f"{interval}s"}).items():
        expression = expression.replace(name, value)
    return expression


def run(arguments, work):
    for tool in ("prometheus", "promtool"):
        if not shutil.which(tool):
            sys.exit(f"{tool} is not on PATH: install Debian's package prometheus")
    monitoring, port = work / "monitoring", free_port()
    (work / "keys.yaml").write_text(KEYS)
    (work / "key").write_text("sk-all")
    up = [
        *[PROGRAMS / "remoe", "up", "--json", "--port", "0", "--ledger", work / "ledger", "--keys", work / "keys.yaml"],
        # A tenant's key would show its own rows alone.
        *["--api-key", "sk-all", "--threads", "1", "--idle", "2s", *arguments.up, arguments.model],
    ]
    environment = os.environ | {"REMOE_BIN_DIR": str(PROGRAMS)}
    failures, stop, pause = [*neglected()], threading.Event(), threading.Event()
    with program(up, stdout=subprocess.PIPE, env=environment) as deployment:
        ready = json.loads(deployment.stdout.readline())
        endpoint = ready["endpoint"]
        model = ready["model"]
        subprocess.run(
            [PROGRAMS / "remoe", "dashboards", monitoring, "--endpoint", endpoint, "--interval", "1s"]
            + ["--api-key-file", work / "key", "--json"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        subprocess.run(["promtool", "check", "config", monitoring / "prometheus.yml"], check=True)
        subprocess.run(["promtool", "check", "rules", *sorted((ROOT / "charts/remoe/files/rules").glob("*.yaml"))], check=True)
        subprocess.run(["promtool", "test", "rules", ROOT / "tests/monitoring/rules-test.yaml"], check=True)
        server = [
            *["prometheus", f"--config.file={monitoring}/prometheus.yml", f"--storage.tsdb.path={work}/data"],
            *[f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
        ]
        clients = [
            threading.Thread(target=load, args=(endpoint, key, stop, pause, failures)) for key in ("sk-search", "sk-chat", "sk-batch")
        ]
        with program(server):
            [client.start() for client in clients]
            try:
                # Under load, asleep, and under load again.
                api, missing = f"http://127.0.0.1:{port}/api/v1", []
                for share, paused in ((0.5, False), (0.25, True), (0.25, False)):
                    (pause.set if paused else pause.clear)()
                    time.sleep(arguments.seconds * share)
                    if paused:
                        missing += asleep(api, monitoring, model)
                # What happened only once, as a wake, is in the interval.
                missing += evaluate(api, monitoring, model, max(15, arguments.seconds // 2))
                if arguments.pictures:
                    folder = pathlib.Path(arguments.pictures)
                    for path in sorted((monitoring / "grafana/dashboards").glob("*.json")):
                        render.dashboard(api, json.loads(path.read_text()), lambda each: substituted(each, model), arguments.seconds, folder / f"{path.stem}.png")
            finally:
                stop.set()
                [client.join() for client in clients]
    subprocess.run([PROGRAMS / "remoe", "cost", work / "ledger", "--reconcile"], check=True)
    return missing + failures


def asleep(api, monitoring, model):
    """What the Cost dashboard shows of a price while everything sleeps, if that does not become 0."""
    panels = {panel["title"]: panel for panel in json.loads((monitoring / "grafana/dashboards/cost.json").read_text())["panels"]}
    prices = [panels[title]["targets"][0]["expr"] for title in ("Cost per hour, now", "Cost per hour by tier")]
    deadline = time.monotonic() + 120
    while True:
        found = [get(f"{api}/query", query=substituted(price, model))["data"]["result"] for price in prices]
        if all(found) and all(float(sample["value"][1]) == 0 for samples in found for sample in samples):
            print("asleep: the Cost dashboard shows a price of 0")
            return []
        if time.monotonic() > deadline:
            return [f"cost.json: a model that sleeps costs something: {found}"]
        time.sleep(0.5)


def evaluate(api, monitoring, model, interval):
    """What of it is an error or has no data."""
    missing, count = [], 0
    for place, expression in expressions(monitoring):
        if any(metric in expression for metric in ELSEWHERE):
            continue
        count += 1
        try:
            found = get(f"{api}/query", query=substituted(expression, model, interval))["data"]["result"]
            if not found:
                missing.append(f"{place}: no data: {expression}")
            elif all(sample["value"][1] == "NaN" for sample in found):
                missing.append(f"{place}: no number: {expression}")
        except urllib.error.HTTPError as error:
            missing.append(f"{place}: {error.read().decode()}: {expression}")
    print(f"{count} expressions evaluated, {len(missing)} without data", *missing, sep="\n")
    return missing


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", metavar="DIR")
    parser.add_argument("--seconds", type=int, default=40)
    parser.add_argument("--model", default=ROOT / "demo/model")
    parser.add_argument("up", nargs="*", default=["--remote", "always", "--replan", "5s"], help="further arguments of up, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        problems = run(arguments, pathlib.Path(work))
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
