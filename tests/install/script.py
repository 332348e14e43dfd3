#!/usr/bin/env python3
"""Check what scripts/install.sh refuses, with an archive whose program is a shell script. Needs neither root nor a network."""

import functools
import hashlib
import http.server
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/install.sh"
DEADLINE_S = 60


class Script(unittest.TestCase):
    """Each test has a folder of packages and an empty prefix."""

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.packages, self.prefix = Path(scratch.name) / "packages", Path(scratch.name) / "prefix"
        self.tools = Path(scratch.name) / "tools"
        for folder in (self.packages, self.tools):
            folder.mkdir()
        self.sums = ""
        self.add("1.2.3")

    def add(self, version: str, program: str = 'echo "remoe $0"') -> Path:
        """Adds an archive of `version` and its checksum."""
        name = f"remoe-{version}-x86_64-linux"
        path = self.packages / f"{name}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for inside, text in [("bin/remoe", f"#!/bin/sh\n{program}\n"), ("share/remoe/demo/config.json", "{}")]:
                entry = tarfile.TarInfo(f"{name}/{inside}")
                entry.size, entry.mode = len(text), 0o755
                archive.addfile(entry, io.BytesIO(text.encode()))
        self.sums += f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        (self.packages / "SHA256SUMS").write_text(self.sums)
        return path

    def tool(self, name: str, script: str) -> None:
        """Puts a program before those of the machine."""
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def install(self, **variables: str) -> subprocess.CompletedProcess:
        environment = os.environ | {
            "no_proxy": "127.0.0.1",
            "REMOE_FROM": str(self.packages), "PREFIX": str(self.prefix), "PATH": f"{self.tools}:{os.environ['PATH']}",
        } | variables  # fmt: skip
        return subprocess.run(["sh", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)

    def refused(self, reason: str, **variables: str) -> None:
        done = self.install(**variables)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(reason, done.stderr)
        self.assertFalse(self.prefix.exists())

    def test_archive_with_its_checksum_is_installed(self) -> None:
        for _ in range(2):
            done = self.install()
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(os.access(self.prefix / "bin/remoe", os.X_OK))
        self.assertEqual((self.prefix / "share/remoe/demo/config.json").read_text(), "{}")
        self.assertEqual([path.name for path in (self.prefix / "bin").iterdir()], ["remoe"])
        self.assertIn(f"add it to PATH:  export PATH=\"{self.prefix}/bin", done.stdout)

    def test_archive_that_changed_is_refused(self) -> None:
        with open(self.packages / "remoe-1.2.3-x86_64-linux.tar.gz", "ab") as archive:
            archive.write(b"x")
        self.refused("checksum mismatch: remoe-1.2.3-x86_64-linux.tar.gz")

    def test_files_that_are_missing_are_refused(self) -> None:
        self.refused("cannot find an archive of version 9.9.9", REMOE_VERSION="9.9.9")
        (self.packages / "remoe-1.2.3-x86_64-linux.tar.gz").unlink()
        self.refused("cannot get remoe-1.2.3-x86_64-linux.tar.gz")
        (self.packages / "SHA256SUMS").write_text("")
        self.refused("cannot find an archive for x86_64")

    def test_archive_of_a_server_is_installed(self) -> None:
        files = functools.partial(http.server.SimpleHTTPRequestHandler, directory=self.packages)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}"
            done = self.install(REMOE_FROM=address)
            self.assertEqual(done.returncode, 0, done.stderr)
            missing = self.install(REMOE_FROM=f"{address}/elsewhere")
            self.assertIn("cannot get SHA256SUMS from", missing.stderr)
            server.shutdown()

    def test_one_of_several_versions_is_chosen(self) -> None:
        self.add("1.2.4", "echo remoe second")
        self.refused("several versions")
        done = self.install(REMOE_VERSION="1.2.4")
        self.assertIn("installed remoe second", done.stdout)

    def test_checksum_line_that_leads_elsewhere_is_refused(self) -> None:
        (self.packages / "SHA256SUMS").write_text(f"{'0' * 64}  remoe-1.2.3/../../x-x86_64-linux.tar.gz\n")
        self.refused("cannot find an archive")

    def test_machines_that_do_not_fit_are_refused(self) -> None:
        self.tool("uname", 'if [ "$1" = -m ]; then echo aarch64; else echo Linux; fi')
        self.refused("unsupported processor architecture aarch64: expected x86_64")
        self.tool("uname", "echo Darwin")
        self.refused("unsupported system Darwin: expected Linux")
        self.tool("uname", 'if [ "$1" = -m ]; then echo x86_64; else echo Linux; fi')
        self.tool("getconf", "echo glibc 2.27")
        self.refused("unsupported glibc 2.27: expected glibc 2.28 or later")
        self.tool("getconf", "exit 1")
        self.refused("missing glibc")

    def test_program_that_does_not_start_is_not_installed(self) -> None:
        self.add("1.2.5", "exit 1")
        self.refused("cannot start", REMOE_VERSION="1.2.5")


if __name__ == "__main__":
    sys.exit(unittest.main())
