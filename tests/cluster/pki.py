"""The cluster's certificates and the files that name them: a fresh authority for each cluster."""

import base64
import json
import subprocess
from pathlib import Path

from layout import API_SERVICE, NODE, Cluster

DAYS = "30"
# Common name and organisation: what Kubernetes takes for user and group.
CLIENTS = {
    "admin": ("remoe-test-admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
    "apiserver-kubelet-client": ("kube-apiserver-kubelet-client", "system:masters"),
}
KUBECONFIGS = ("admin", "controller-manager", "scheduler", "kubelet")


def openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")


def key(folder: Path, name: str) -> None:
    openssl(folder, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", f"{name}.key")


def sign(folder: Path, name: str, subject: str, extensions: str) -> None:
    key(folder, name)
    (folder / f"{name}.ext").write_text(extensions)
    openssl(folder, "req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
    openssl(
        folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days", DAYS,
        "-extfile", f"{name}.ext", "-out", f"{name}.crt",
    )  # fmt: skip


def make(cluster: Cluster) -> None:
    """Write the authority, the certificates, the key of service accounts and the kubeconfigs."""
    folder = cluster.root / "pki"
    folder.mkdir(mode=0o700)
    key(folder, "ca")
    openssl(folder, "req", "-x509", "-new", "-key", "ca.key", "-subj", "/CN=remoe-test-cluster", "-days", DAYS, "-out", "ca.crt")
    names = ["DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc", "DNS:localhost"]
    names += [f"IP:{address}" for address in ("127.0.0.1", API_SERVICE, cluster.node_address)]
    sign(folder, "apiserver", "/CN=kube-apiserver", f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth\n")
    for name, (user, group) in CLIENTS.items():
        subject = (f"/O={group}" if group else "") + f"/CN={user}"
        sign(folder, name, subject, "extendedKeyUsage=clientAuth\n")
    key(folder, "service-accounts")
    openssl(folder, "pkey", "-in", "service-accounts.key", "-pubout", "-out", "service-accounts.pub")
    for name in KUBECONFIGS:
        path = cluster.kubeconfig if name == "admin" else folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(kubeconfig(cluster, folder, name), indent=2))
        path.chmod(0o600)


def kubeconfig(cluster: Cluster, folder: Path, client: str) -> dict:
    def data(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": cluster.name, "cluster": {"server": cluster.server, "certificate-authority-data": data("ca.crt")}}
        ],
        "users": [
            {
                "name": client,
                "user": {
                    "client-certificate-data": data(f"{client}.crt"),
                    "client-key-data": data(f"{client}.key"),
                },
            }
        ],
        "contexts": [{"name": cluster.name, "context": {"cluster": cluster.name, "user": client}}],
        "current-context": cluster.name,
    }
