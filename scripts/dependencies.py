"""What the packaged programs are linked from: an SBOM in the format CycloneDX, and the licence texts.

https://cyclonedx.org/docs/1.5/json/
"""

import json
import subprocess
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET = "x86_64-unknown-linux-gnu"
# Names of files with licence texts; crates with sources in C keep those of their libraries one folder below.
TEXTS = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "UNLICENSE*")


@dataclass
class Dependency:
    """A package from elsewhere that is linked."""

    name: str
    version: str
    licence: str
    repository: str | None
    sha256: str | None
    folder: Path
    # Names and versions of linked packages that it needs.
    needs: list[str]

    @property
    def url(self) -> str:
        return f"pkg:cargo/{quote(self.name)}@{quote(self.version)}"


def linked(packages: list[str]) -> list[Dependency]:
    """Returns what `packages` of the workspace are linked from. Build scripts and procedural macros do not belong to it."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    metadata = json.loads(done.stdout)
    by_id = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    locked = tomllib.loads((REPOSITORY / "Cargo.lock").read_text())["package"]
    hashes = {(package["name"], package["version"]): package.get("checksum") for package in locked}

    def needs(identity: str) -> list[str]:
        found = []
        for dependency in nodes[identity]["deps"]:
            is_macro = any("proc-macro" in target["kind"] for target in by_id[dependency["pkg"]]["targets"])
            if not is_macro and any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                found.append(dependency["pkg"])
        return found

    def dependency(identity: str) -> Dependency:
        package = by_id[identity]
        name, version = package["name"], package["version"]
        below = [by_id[each] for each in needs(identity)]
        return Dependency(
            name, version, package["license"] or "", package["repository"], hashes.get((name, version)),
            Path(package["manifest_path"]).parent, [f"{each['name']} {each['version']}" for each in below],
        )  # fmt: skip

    ahead = [each for each in metadata["workspace_members"] if by_id[each]["name"] in packages]
    seen = set(ahead)
    while ahead:
        for below in needs(ahead.pop()):
            if below not in seen:
                seen.add(below)
                ahead.append(below)
    foreign = [dependency(each) for each in seen if by_id[each]["source"] is not None]
    return sorted(foreign, key=lambda each: (each.name, each.version))


def sbom(version: str, time: str, dependencies: list[Dependency]) -> bytes:
    """Returns the SBOM of the packages. The same dependencies give the same bytes."""
    compiler = subprocess.run(["rustc", "--version"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    root = f"pkg:github/remoe/remoe@v{version}"
    references = {f"{each.name} {each.version}": each.url for each in dependencies}

    def component(each: Dependency) -> dict:
        found = {
            "type": "library", "bom-ref": each.url, "name": each.name, "version": each.version, "purl": each.url,
            # Cargo once separated alternatives by slashes.
            "licenses": [{"expression": each.licence.replace("/", " OR ")}],
        }  # fmt: skip
        if each.sha256:
            found["hashes"] = [{"alg": "SHA-256", "content": each.sha256}]
        if each.repository:
            found["externalReferences"] = [{"type": "vcs", "url": each.repository}]
        return found

    edges = [
        {"ref": each.url, "dependsOn": sorted(references[name] for name in each.needs if name in references)}
        for each in dependencies
    ]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": time,
            "component": {
                "type": "application", "bom-ref": root, "name": "remoe", "version": version, "purl": root,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
            "properties": [{"name": "rustc", "value": compiler.stdout.strip()}],
        },
        "components": [component(each) for each in dependencies],
        "dependencies": [{"ref": root, "dependsOn": [each.url for each in dependencies]}, *edges],
    }  # fmt: skip
    return (json.dumps(document, indent=1) + "\n").encode()


def licence_texts(dependencies: list[Dependency]) -> bytes:
    """Returns the licence texts of all dependencies, each text once."""
    users = defaultdict(list)
    for each in dependencies:
        for pattern in TEXTS:
            for path in sorted([*each.folder.glob(pattern), *each.folder.glob(f"*/{pattern}")]):
                if path.is_file():
                    users[path.read_text(errors="replace").strip()].append(f"{each.name} {each.version}")
    parts = ["Licences of the packages that Remoe's programs are linked from:\n"]
    parts += [f"  {each.name} {each.version}: {each.licence}" for each in dependencies]
    for text, names in sorted(users.items(), key=lambda item: item[1]):
        parts.append(f"\n{'=' * 100}\n{', '.join(dict.fromkeys(names))}\n{'-' * 100}\n{text}")
    return ("\n".join(parts) + "\n").encode()
