#!/usr/bin/env python3
"""A real Prometheus scrapes a tenant's pod by the rules of the chart's PodMonitor: the page says nothing about others.

    tests/monitoring/podmonitor.py

The page of the pod names another namespace, another model and another pod in its labels, a time in the future, and has
series of gateways, the operator and recording rules. Needs prometheus (Debian's package) on PATH, and helm there or among
the programs of the test cluster. Without one of them, says that nothing was tested.
"""

import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import check

ROOT = pathlib.Path(__file__).resolve().parents[2]
FORGED = 'model="platform",namespace="remoe-system",pod="remoe-gateway",job="remoe",instance="other",deployment="other"'
PAGE = "".join(
    f"{name}{{{FORGED}}} {value} {when}\n"
    for name, value, when in (
        ("remoe_expert_pairs_total", 1, ""),
        ("remoe_requests_total", 2, int((time.time() + 60) * 1000)),
        ("process_resident_memory_bytes", 3, ""),
        ("remoe_gateway_requests_total", 4, ""),
        ("remoe_gateway_model_awake", 4, ""),
        ("remoe_cost_paid_nanodollars", 5, ""),
        ("remoe_budget_spent_nanodollars", 6, ""),
        ("remoe_ledger_failures_total", 7, ""),
        ("remoe_operator_reconcile_errors_total", 8, ""),
        ("remoe_prediction_errors_total", 9, ""),
        ("remoe:budget_spent:ratio", 10, ""),
        ("ALERTS", 11, ""),
        ("up", 12, ""),
        ("kube_pod_info", 13, ""),
    )
)
# A sample of the future would not be found.
KEPT = {"remoe_expert_pairs_total", "remoe_requests_total", "process_resident_memory_bytes"}
# Prometheus writes them about each target itself.
OWN = {"up"}


class Pod(http.server.BaseHTTPRequestHandler):
    """The metrics of a tenant."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_):
        pass


def snake(name):
    return re.sub(r"[A-Z]", lambda letter: "_" + letter[0].lower(), name)


def rules(monitor, field):
    """The relabelling rules of the PodMonitor as Prometheus has them."""
    lines = re.search(rf"^      {field}:\n((?:        - .*\n)+)", monitor, re.MULTILINE)[1].splitlines()
    fields = r"(\w+): (\[[^\]]*\]|\"[^\"]*\"|[^,}]+)"
    rules = [dict(re.findall(fields, line.strip()[3:-1])) for line in lines]
    parse = lambda text: [item.strip() for item in text[1:-1].split(",")] if text[0] == "[" else text.strip('"')
    return [{snake(key): parse(value) for key, value in rule.items()} for rule in rules]


def flag(monitor, field):
    return {"true": True, "false": False}[re.search(rf"^      {field}: (\w+)$", monitor, re.MULTILINE)[1]]


def scrape(monitor, port):
    """A scrape job as the Prometheus operator makes it of the PodMonitor, for one pod."""
    meta = {"namespace": "tenant", "pod_name": "demo-main-0", "pod_label_remoe_dev_deployment": "demo"}
    target = {f"__meta_kubernetes_{name}": value for name, value in meta.items()}
    own = [("namespace", "namespace"), ("pod_name", "pod"), ("pod_label_remoe_dev_deployment", "remoe_dev_deployment")]
    relabel = [{"source_labels": [f"__meta_kubernetes_{source}"], "target_label": name} for source, name in own]
    return {
        "job_name": "podMonitor/remoe-system/remoe-functions/0",
        "scrape_interval": "1s",
        "honor_labels": flag(monitor, "honorLabels"),
        "honor_timestamps": flag(monitor, "honorTimestamps"),
        "sample_limit": int(re.search(r"^  sampleLimit: (\d+)$", monitor, re.MULTILINE)[1]),
        "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": target}],
        "relabel_configs": relabel + rules(monitor, "relabelings"),
        "metric_relabel_configs": rules(monitor, "metricRelabelings"),
    }


def series(prometheus, until):
    while True:
        try:
            found = check.get(f"{prometheus}/api/v1/query", query='{__name__=~".+"}')["data"]["result"]
        except OSError:
            found = []
        if len(found) > len(KEPT) or time.time() > until:
            return found
        time.sleep(0.2)


def main():
    built = subprocess.run([ROOT / "tests/cluster/binaries.py"], capture_output=True, text=True).stdout.strip()
    path = f"{built}:{os.environ['PATH']}" if built else os.environ["PATH"]
    helm, prometheus = shutil.which("helm", path=path), shutil.which("prometheus", path=path)
    if helm is None or prometheus is None:
        missing = "helm" if helm is None else "prometheus"
        print(f"monitoring: the PodMonitor was NOT TESTED: no {missing} on PATH", file=sys.stderr)
        return
    command = [helm, "template", "remoe", ROOT / "charts/remoe", "--namespace", "remoe-system", "--set=podMonitor.enabled=true"]
    monitor = subprocess.run(
        [*command, "--show-only", "templates/podmonitor.yaml"], capture_output=True, text=True, check=True
    ).stdout
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pod)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        (work / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape(monitor, server.server_port)]}))
        port = check.free_port()
        arguments = [prometheus, f"--config.file={work}/prometheus.yml", f"--storage.tsdb.path={work}/data"]
        with check.program([*arguments, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL):
            found = series(f"http://127.0.0.1:{port}", time.time() + 60)
    scraped = [each["metric"] for each in found if not each["metric"]["__name__"].startswith("scrape_")]
    names = {metric["__name__"] for metric in scraped}
    if names != KEPT | OWN:
        sys.exit(f"monitoring: expected {sorted(KEPT | OWN)} of a tenant's pod, got {sorted(names)}")
    whose = {"namespace": "tenant", "pod": "demo-main-0", "model": "demo", "remoe_dev_deployment": "demo"}
    for metric in scraped:
        wrong = {name: metric.get(name) for name, value in whose.items() if metric.get(name) != value}
        if wrong or metric["job"] == "remoe" or (metric["__name__"] in OWN and "exported_model" in metric):
            sys.exit(f"monitoring: a tenant's pod chose labels of {metric}: expected {whose}")
    print(f"monitoring: a tenant's pod serves {sorted(names)}, all labelled as its own")


main()
