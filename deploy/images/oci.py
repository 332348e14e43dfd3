"""Container images as tar files in the OCI layout, written without a container engine.

The same files give the same bytes: names are sorted, and times, owners and modes are fixed.
https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

import hashlib
import io
import json
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ARCHITECTURE = "amd64"
CREATED = "1970-01-01T00:00:00Z"
CHUNK = 1 << 22


@dataclass
class Layer:
    """Files of an image, by their absolute paths in it."""

    # Contents, or the file of this host that has them, and the mode.
    files: dict[str, tuple[bytes | Path, int]] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)

    def add(self, path: str, contents: bytes | Path, mode: int = 0o644) -> None:
        self.files[path] = (contents, mode)

    def write(self, target) -> None:
        """Write the layer as a tar archive, everything owned by root."""
        folders = dict(self.folders)
        for path in self.files:
            for parent in list(Path(path).parents)[:-1]:
                folders.setdefault(str(parent), 0o755)
        with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted({*folders, *self.files}):
                entry = tarfile.TarInfo(path.lstrip("/"))
                if path in folders:
                    entry.type, entry.mode = tarfile.DIRTYPE, folders[path]
                    archive.addfile(entry)
                    continue
                contents, entry.mode = self.files[path]
                if isinstance(contents, bytes):
                    entry.size = len(contents)
                    archive.addfile(entry, io.BytesIO(contents))
                else:
                    with open(contents, "rb") as source:
                        entry.size = contents.stat().st_size
                        archive.addfile(entry, source)


def sha256(source) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def write_image(out: Path, reference: str, layers: list[Layer], config: dict) -> str:
    """Write `out`, an image named `reference`, and return the digest of its manifest.

    `config` is the OCI execution configuration: User, Entrypoint, Env and so on.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside `out`: layers are large, and the folder for temporary files may lie in memory.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        blobs: list[tuple[str, bytes | Path, int]] = []

        def blob(contents: bytes | Path, media_type: str) -> dict:
            if isinstance(contents, bytes):
                digest, size = sha256(io.BytesIO(contents)), len(contents)
            else:
                with open(contents, "rb") as source:
                    digest, size = sha256(source), contents.stat().st_size
            blobs.append((digest, contents, size))
            return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}

        descriptors = []
        for number, layer in enumerate(layers):
            path = Path(scratch) / str(number)
            with open(path, "wb") as target:
                layer.write(target)
            descriptors.append(blob(path, "application/vnd.oci.image.layer.v1.tar"))
        image = {
            "created": CREATED,
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": config,
            # Layers are not compressed, so a layer is named by the same digest in both places.
            "rootfs": {"type": "layers", "diff_ids": [each["digest"] for each in descriptors]},
            "history": [{"created": CREATED, "created_by": "deploy/images/build.py"} for _ in descriptors],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(to_json(image), "application/vnd.oci.image.config.v1+json"),
            "layers": descriptors,
        }
        named = blob(to_json(manifest), manifest["mediaType"])
        named["annotations"] = {
            # The first is for containerd, the second what the specification has.
            "io.containerd.image.name": reference,
            "org.opencontainers.image.ref.name": reference.rsplit(":", 1)[1],
        }
        index = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [named],
        }
        layout = Layer()
        layout.add("/oci-layout", to_json({"imageLayoutVersion": "1.0.0"}))
        layout.add("/index.json", to_json(index))
        for digest, contents, _ in blobs:
            layout.add(f"/blobs/sha256/{digest}", contents)
        finished = Path(scratch) / "image"
        with open(finished, "wb") as target:
            layout.write(target)
        finished.rename(out)
    return named["digest"]


def read_name(tar: Path) -> tuple[str, str]:
    """The reference and the manifest's digest of an image that `write_image` wrote."""
    with tarfile.open(tar) as archive:
        (named,) = json.load(archive.extractfile("index.json"))["manifests"]
    return named["annotations"]["io.containerd.image.name"], named["digest"]


def to_json(value: dict) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
