"""The few calls that setting a cluster up takes from its API server, as its administrator."""

import json
import ssl
import urllib.error
import urllib.request

from layout import NODE, Cluster

TIMEOUT_S = 5


class Api:
    def __init__(self, cluster: Cluster):
        pki = cluster.root / "pki"
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        # An address, not a proxy that the environment may name.
        self.opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        self.server = cluster.server

    def call(self, method: str, path: str, body: dict | None = None) -> dict | str:
        """The answer to one request: an object, or text where the server sends text."""
        request = urllib.request.Request(
            self.server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with self.opener.open(request, timeout=TIMEOUT_S) as response:
            text = response.read().decode()
            return json.loads(text) if "json" in response.headers.get("Content-Type", "") else text

    def create(self, path: str, body: dict) -> None:
        """Create an object that may be there already."""
        try:
            self.call("POST", path, body)
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise

    def ready(self) -> bool:
        try:
            return self.call("GET", "/readyz") == "ok"
        except OSError:
            return False

    def node_ready(self) -> bool:
        try:
            node = self.call("GET", f"/api/v1/nodes/{NODE}")
        except OSError:
            return False
        return any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"])

    def default_account_exists(self) -> bool:
        """No pod can be made in a namespace before it has this account."""
        try:
            self.call("GET", "/api/v1/namespaces/default/serviceaccounts/default")
        except OSError:
            return False
        return True
