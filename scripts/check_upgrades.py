#!/usr/bin/env python3
"""Check what an upgrade of the chart keeps: renders it with helm before an API server of this script, which has the gateways of
an installed release."""

import json
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHART = Path(__file__).resolve().parent.parent / "charts" / "remoe"
RELEASE, NAMESPACE = "one", "system"
GATEWAY = f"{RELEASE}-remoe-gateway"
# By group and version, the kinds that the chart looks up.
KINDS = {
    "v1": [("secrets", "Secret")],
    "apps/v1": [("deployments", "Deployment")],
    "coordination.k8s.io/v1": [("leases", "Lease")],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy")],
}
DRAWN = {"admin": "c2stYWRtaW4=", "metrics": "c2stbWV0cmljcw==", "keys.yaml": "dGVuYW50czogW10="}


def gateways(*arguments: str) -> dict:
    containers = [{"name": "gateway", "args": [f"--release={RELEASE}", *arguments]}]
    return {f"deployments/{GATEWAY}": {"spec": {"template": {"spec": {"containers": containers}}}}}


POLICY = {f"networkpolicies/{GATEWAY}": {}}
KEYS = {f"secrets/{GATEWAY}-keys": {"data": DRAWN}}
OLD = gateways("--keys=/keys/keys.yaml")
# What the release has, values, and what the upgraded one has then: keys or not, short names, a policy.
CASES = [
    ("0.1.0 without keys", gateways(), [], ("--open", "any", False)),
    ("the same, closed", gateways(), ["gateway.open=false"], ("--keys", "any", False)),
    ("the same, closed and scoped", gateways(), ["gateway.open=false", "gateway.scopedNames=true", "gateway.networkPolicy.enabled=true"], ("--keys", "scoped", True)),
    ("0.1.0 with keys", OLD, ["gateway.keysSecretName=k"], ("--keys", "any", False)),
    ("0.1.0 without gateways", {}, [], ("--keys", "scoped", True)),
    ("one that stayed open", gateways("--open", "--short-names=any"), [], ("--open", "any", False)),
    ("one of now", gateways("--keys=/keys/keys.yaml", "--short-names=scoped") | POLICY | KEYS, [], ("--keys", "scoped", True)),
    ("one of now, its Secret lost", gateways("--keys=/keys/keys.yaml", "--short-names=scoped") | POLICY, [], ("--keys", "scoped", True)),
]


class Server(BaseHTTPRequestHandler):
    """An API server that has `objects`."""

    objects: dict = {}

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        if path == "version":
            return self.answer(200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"})
        if path == "api":
            return self.answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        if path == "apis":
            versions = [(of, {"groupVersion": of, "version": "v1"}) for of in KINDS if "/" in of]
            groups = [{"name": of.split("/")[0], "versions": [version], "preferredVersion": version} for of, version in versions]
            return self.answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        for version, kinds in KINDS.items():
            root = ("apis/" if "/" in version else "api/") + version
            if path == root:
                resources = [{"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list"]} for name, kind in kinds]
                return self.answer(200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources})
            for name, kind in kinds:
                found = path.removeprefix(f"{root}/namespaces/{NAMESPACE}/")
                if found in self.objects and found.startswith(f"{name}/"):
                    return self.answer(200, {"apiVersion": version, "kind": kind, "metadata": {"name": found.split("/")[1]}} | self.objects[found])
        return self.answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404})

    def answer(self, status: int, body: dict) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


def render(kubeconfig: Path, values: list[str]) -> str:
    command = ["helm", "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--is-upgrade", "--dry-run=server"]
    command += ["--kubeconfig", str(kubeconfig), "--set", "crds.install=false"]
    for value in values:
        command += ["--set", value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        sys.exit(f"cannot render the chart with {values}:\n{done.stderr}")
    return done.stdout


def main() -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "config"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {}}],
        }))  # fmt: skip
        for name, has, values, expected in CASES:
            Server.objects = has
            text = render(kubeconfig, values)
            lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
            names = next(line.removeprefix("--short-names=") for line in lines if line.startswith("--short-names="))
            keys = "--open" if "--open" in lines else "--keys"
            found = (keys, names, f"kind: NetworkPolicy\nmetadata:\n  name: {GATEWAY}\n" in text)
            if found != expected:
                faults.append(f"{name}: expected {expected}, got {found}")
            if KEYS.items() <= has.items() and f"admin: {DRAWN['admin']}" not in lines:
                faults.append(f"{name}: its keys are drawn again")
    server.shutdown()
    for fault in faults:
        print(f"chart: upgrade of {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
