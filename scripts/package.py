#!/usr/bin/env python3
"""Write packages of the programs for one machine: an archive, a wheel, a Debian package, an SBOM and SHA256SUMS.

    scripts/package.py --programs target/x86_64-unknown-linux-gnu/dist --glibc 2.28

Packages hold `remoe`, both function programs and the demo model, which programs find in ../share/remoe/demo from their
own folder. They say which glibc the programs need; --glibc fails if that is a later one. The same programs and the same
commit give the same bytes. Needs binutils and dpkg-deb; otherwise only the standard library.
"""

import argparse
import base64
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import dependencies
import glibc_versions

REPOSITORY = Path(__file__).resolve().parent.parent
# Names of the programs, and of the crates that they are built from.
PROGRAMS = ["remoe", "main-model-fn", "remote-expert-fn"]
MODEL = [
    "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
]  # fmt: skip
HOMEPAGE = "https://github.com/remoe/remoe"
SUMMARY = "Serves Mixture-of-Experts models with experts in separate processes"
# The oldest glibc that packages are made for.
OLDEST_GLIBC = (2, 28)
DPKG_DEADLINE_S = 600
# Levels of compression.
FAST, BEST = 1, 9

# Contents, or the file that has them, and the mode, by the path below the prefix.
Files = dict[str, tuple[bytes | Path, int]]


@dataclass
class Release:
    """What every package says of itself."""

    version: str
    # Seconds since 1970 of the commit.
    time: int
    # The glibc that the programs need.
    glibc: glibc_versions.Version
    notices: bytes

    @property
    def name(self) -> str:
        return f"remoe-{self.version}-x86_64-linux"

    def readme(self) -> bytes:
        return f"""Remoe {self.version} for Linux on x86-64 with glibc {glibc_versions.text_of(self.glibc)} or later.

First answer:      remoe run demo "Read Genesis 1:1."
Documentation:     {HOMEPAGE}/tree/v{self.version}/docs
Licence:           Apache-2.0, and those in THIRD-PARTY-LICENSES
""".encode()


def contents(source: bytes | Path) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


def files_of(programs: Path) -> Files:
    """Programs and demo model, which every package has."""
    files: Files = {f"bin/{name}": (programs / name, 0o755) for name in PROGRAMS}
    return files | {f"share/remoe/demo/{name}": (REPOSITORY / "demo/model" / name, 0o644) for name in MODEL}


def archive(out: Path, files: Files, release: Release, level: int) -> None:
    """Write the archive, whose one folder is a prefix."""
    files = files | {
        "share/doc/remoe/README": (release.readme(), 0o644),
        "share/doc/remoe/LICENSE": (REPOSITORY / "LICENSE", 0o644),
        "share/doc/remoe/THIRD-PARTY-LICENSES": (release.notices, 0o644),
    }
    with gzip.GzipFile(out, "wb", level, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        folders = {str(parent) for path in files for parent in list(Path(path).parents)[:-1]}
        for path in ["", *sorted({*folders, *files})]:
            entry = tarfile.TarInfo(f"{release.name}/{path}".rstrip("/"))
            entry.mtime = release.time
            if path not in files:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
                continue
            source, entry.mode = files[path]
            data = contents(source)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def wheel(folder: Path, files: Files, release: Release, level: int) -> None:
    """Write the wheel, from which pip puts the programs beside those of the environment.

    https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    """
    # A pre-release of Cargo, such as 1.2.3-rc.1, is 1.2.3rc.1 for Python.
    version = release.version.replace("-", "")
    tag = f"py3-none-manylinux_{'_'.join(map(str, release.glibc))}_x86_64"
    about, data = f"remoe-{version}.dist-info", f"remoe-{version}.data"
    metadata = (
        f"Metadata-Version: 2.1\nName: remoe\nVersion: {version}\nSummary: {SUMMARY}\nHome-page: {HOMEPAGE}\n"
        "License: Apache-2.0\nClassifier: Operating System :: POSIX :: Linux\n"
        "Description-Content-Type: text/plain\n\n"
    )  # fmt: skip
    inside: Files = {
        f"{data}/scripts/{path.removeprefix('bin/')}" if path.startswith("bin/") else f"{data}/data/{path}": entry
        for path, entry in files.items()
    }
    inside |= {
        f"{about}/METADATA": (metadata.encode() + release.readme(), 0o644),
        f"{about}/WHEEL": (f"Wheel-Version: 1.0\nGenerator: remoe\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(), 0o644),
        f"{about}/licenses/LICENSE": (REPOSITORY / "LICENSE", 0o644),
        f"{about}/licenses/THIRD-PARTY-LICENSES": (release.notices, 0o644),
    }
    record = ""
    with zipfile.ZipFile(folder / f"remoe-{version}-{tag}.whl", "w", zipfile.ZIP_DEFLATED, compresslevel=level) as packed:

        def add(path: str, content: bytes, mode: int) -> None:
            entry = zipfile.ZipInfo(path, time.gmtime(release.time)[:6])
            entry.external_attr = (0o100000 | mode) << 16
            packed.writestr(entry, content, zipfile.ZIP_DEFLATED)

        for path, (source, mode) in sorted(inside.items()):
            content = contents(source)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(content)}\n"
            add(path, content, mode)
        add(f"{about}/RECORD", f"{record}{about}/RECORD,,\n".encode(), 0o644)


def debian(folder: Path, files: Files, release: Release, level: int) -> None:
    """Write the Debian package."""
    # A tilde sorts a pre-release before its release.
    version = release.version.replace("-", "~")
    licence = (
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
        f"Upstream-Name: remoe\nSource: {HOMEPAGE}\n\nFiles: *\nCopyright: the Remoe authors\nLicense: Apache-2.0\n"
        " The text is in /usr/share/common-licenses/Apache-2.0. THIRD-PARTY-LICENSES beside this file has those of the\n"
        " packages that the programs are linked from.\n"
    )  # fmt: skip
    files = files | {
        "share/doc/remoe/copyright": (licence.encode(), 0o644),
        "share/doc/remoe/THIRD-PARTY-LICENSES": (release.notices, 0o644),
    }
    with tempfile.TemporaryDirectory(dir=folder, prefix=".deb-") as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        for path, (source, mode) in files.items():
            target = root / "usr" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(contents(source))
            target.chmod(mode)
        size = sum((root / "usr" / path).stat().st_size for path in files)
        control = root / "DEBIAN/control"
        control.parent.mkdir()
        control.write_text(
            f"Package: remoe\nVersion: {version}\nArchitecture: amd64\nMaintainer: Remoe maintainers\n"
            f"Installed-Size: {size // 1024}\nDepends: libc6 (>= {glibc_versions.text_of(release.glibc)}), libgcc-s1\n"
            f"Section: science\nPriority: optional\nHomepage: {HOMEPAGE}\nDescription: {SUMMARY}\n"
            " The command remoe, the programs of its functions, and a demo model of 12 MB.\n"
        )  # fmt: skip
        out = folder / f"remoe_{version}_amd64.deb"
        # xz packs a quarter better than gzip and takes several times as long.
        compression = ["-Zxz"] if level == BEST else ["-Zgzip", f"-z{level}"]
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(release.time)}
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", *compression, "--build", str(root), str(out)],
            env=environment, stdout=subprocess.DEVNULL, check=True, timeout=DPKG_DEADLINE_S,
        )  # fmt: skip


def commit_time() -> int:
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of the built programs")
    parser.add_argument("--glibc", type=glibc_versions.parse, metavar="VERSION", help="fail if a program needs a later glibc")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "target/packages", help="where the packages go")
    parser.add_argument("--fast", action="store_true", help="compress little, for tests")
    given = parser.parse_args()
    missing = [name for name in PROGRAMS if not (given.programs / name).is_file()]
    if missing:
        sys.exit(f"package: {', '.join(missing)} not found in {given.programs}: build with `make dist` or `make packages`")
    glibc = OLDEST_GLIBC
    for name in PROGRAMS:
        needed = glibc_versions.needed(given.programs / name)
        glibc = max(glibc, needed)
        size = (given.programs / name).stat().st_size / 1e6
        print(f"{size:8.1f} MB  {name}, glibc {glibc_versions.text_of(needed)}")
    if given.glibc and glibc > given.glibc:
        sys.exit(f"package: programs need glibc {glibc_versions.text_of(glibc)}, at most {glibc_versions.text_of(given.glibc)} is allowed")
    version = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    linked = dependencies.linked(PROGRAMS)
    release = Release(version, commit_time(), glibc, dependencies.licence_texts(linked))
    given.folder.mkdir(parents=True, exist_ok=True)
    for old in [*given.folder.glob("remoe[-_]*"), *given.folder.glob("SHA256SUMS*")]:
        old.unlink()
    files, level = files_of(given.programs), FAST if given.fast else BEST
    archive(given.folder / f"{release.name}.tar.gz", files, release, level)
    wheel(given.folder, files, release, level)
    debian(given.folder, files, release, level)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(release.time))
    (given.folder / f"remoe-{version}.cdx.json").write_bytes(dependencies.sbom(version, stamp, linked))
    made = sorted(given.folder.glob("remoe[-_]*"))
    with open(given.folder / "SHA256SUMS", "w") as sums:
        for path in made:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            print(f"{digest}  {path.name}", file=sums)
            print(f"{path.stat().st_size / 1e6:8.1f} MB  {path}")


if __name__ == "__main__":
    main()
