#!/usr/bin/env python3
"""Compare the rights that the Helm chart grants to its service accounts with charts/permissions/.

    scripts/permissions.py            compare
    scripts/permissions.py --write    write the files

Each line of a file is one right: account, scope (`cluster`, or a namespace), API group (`core` for the empty one), resource,
resource names (`*` for all), verbs. A change of the chart's roles shows there as a difference to review. The cluster tests
(tests/e2e/tests/it/permissions.rs) compare `namespaces.txt` with what an API server answers. Needs helm on PATH.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "charts" / "permissions"
RELEASE, NAMESPACE = "remoe", "remoe-system"
# By file, the values that it is about.
VARIANTS = {
    "cluster.txt": [],
    "all-namespaces.txt": ["identity.allNamespaces=true"],
    "namespaces.txt": ["watchNamespaces={models}"],
    "cert-manager.txt": ["watchNamespaces={models}", "identity.signer=cert-manager"],
    "no-gateways.txt": ["watchNamespaces={models}", "gateway.enabled=false", "identity.signer=none"],
}
ACCOUNTS = {"remoe": "operator", "remoe-gateway": "gateway"}


def scalar(text: str) -> str:
    return text.strip().strip("\"'")


def items(text: str) -> list[str]:
    """A list in flow style."""
    inner = re.fullmatch(r"\[(.*)\]", text.strip())
    if inner is None:
        sys.exit(f"permissions: expected a list, got {text!r}")
    return [scalar(item) for item in inner[1].split(",")] if inner[1].strip() else []


def rules(document: str) -> list[dict[str, list[str]]]:
    """The rules of a role as the chart writes them. Anything else ends the check."""
    found: list[dict[str, list[str]]] = []
    block = None
    for line in document.split("\nrules:\n", 1)[1].splitlines():
        line = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if not line:
            continue
        if field := re.fullmatch(r"(  - |    )(apiGroups|resources|resourceNames|verbs):(.*)", line):
            if field[1] == "  - ":
                found.append({})
            block = field[2]
            found[-1][block] = items(field[3]) if field[3].strip() else []
        elif item := re.fullmatch(r"      - (\S+)", line):
            found[-1][block].append(scalar(item[1]))
        else:
            sys.exit(f"permissions: cannot read the rule {line!r}")
    return found


def head(document: str, field: str) -> str | None:
    found = re.search(rf"^  {field}: (\S+)$", document, re.MULTILINE)
    return found and scalar(found[1])


def rights(rendered: str) -> list[str]:
    """Every right of the accounts, as lines."""
    roles, lines = {}, set()
    documents = [document for document in re.split(r"^---$", rendered, flags=re.MULTILINE) if document.strip()]
    kinds = [(re.search(r"^kind: (\w+)$", document, re.MULTILINE), document) for document in documents]
    for kind, document in kinds:
        if kind and kind[1] in ("Role", "ClusterRole"):
            roles[kind[1], head(document, "namespace"), head(document, "name")] = rules(document)
    for kind, document in kinds:
        if not kind or kind[1] not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        reference = document.split("\nroleRef:\n", 1)[1]
        subject = re.search(r"^  - kind: ServiceAccount\n    name: (\S+)$", document, re.MULTILINE)
        if subject is None or subject[1] not in ACCOUNTS:
            sys.exit(f"permissions: {kind[1]} {head(document, 'name')} binds an unknown account")
        namespace = head(document, "namespace")
        role_kind = head(reference, "kind")
        of_role = (role_kind, namespace if role_kind == "Role" else None, head(reference, "name"))
        for rule in roles[of_role]:
            names = ",".join(rule.get("resourceNames", [])) or "*"
            verbs = ",".join(sorted(rule["verbs"]))
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    right = (ACCOUNTS[subject[1]], namespace or "cluster", group or "core", resource, names, verbs)
                    lines.add(" ".join(right))
    return sorted(lines)


def rendered(values: list[str]) -> str:
    command = ["helm", "template", RELEASE, str(ROOT / "charts/remoe"), "--namespace", NAMESPACE]
    for value in values:
        command += ["--set", value]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(__doc__)
    differ = []
    FILES.mkdir(exist_ok=True)
    for name, values in VARIANTS.items():
        title = f"# Rights with {', '.join(values) or 'the default values'} (scripts/permissions.py --write)"
        text = "\n".join([title, *rights(rendered(values)), ""])
        path = FILES / name
        if sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            differ.append(name)
            known = path.read_text() if path.exists() else ""
            for line in sorted(set(known.splitlines()) ^ set(text.splitlines())):
                print(f"permissions: {name}: {'-' if line in known.splitlines() else '+'} {line}", file=sys.stderr)
    if differ:
        sys.exit(f"permissions: the chart grants other rights than {', '.join(differ)}: review, then run scripts/permissions.py --write")


main()
