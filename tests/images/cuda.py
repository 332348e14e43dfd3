#!/usr/bin/env python3
"""Start the main function of an image for GPUs where there is none: it must say so and exit with 3.

    tests/images/cuda.py target/images/remoe-main-cuda.tar

The image is unpacked into a folder and its program started with that as its root, so that it has nothing but what the image
holds; that takes root. There are no devices in it, whatever the machine has.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "demo/model"
START_DEADLINE_S = 300
EXIT_NO_DEVICE = 3


def unpack(image: Path, root: Path) -> dict:
    """Write the files of `image` into `root` and return its execution configuration."""
    with tarfile.open(image) as archive:

        def blob(digest: str):
            return archive.extractfile(f"blobs/{digest.replace(':', '/')}")

        (named,) = json.load(archive.extractfile("index.json"))["manifests"]
        manifest = json.load(blob(named["digest"]))
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=blob(layer["digest"])) as files:
                files.extractall(root, filter="fully_trusted")
        return json.load(blob(manifest["config"]["digest"]))["config"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path, help="a tar that deploy/images/build.py wrote")
    image = parser.parse_args().image
    if os.geteuid() != 0:
        sys.exit("cuda: another root folder takes root")
    # Beside the image: it is large, and the folder for temporary files may lie in memory.
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".cuda-") as scratch:
        # The program's start leaves this folder before it changes its root.
        root = Path(scratch).resolve()
        config = unpack(image, root)
        root.chmod(0o755)
        shutil.copytree(MODEL, root / "model")
        user, group = (int(each) for each in config["User"].split(":"))
        command = [*config["Entrypoint"], "--model", "/model", "--device", "cuda", "--control-listen", "127.0.0.1:0", "--no-http"]
        done = subprocess.run(
            command, env=dict(variable.split("=", 1) for variable in config["Env"]), capture_output=True, text=True,
            timeout=START_DEADLINE_S, cwd="/", preexec_fn=lambda: (os.chroot(root), os.chdir("/"), os.setgid(group), os.setuid(user)),
        )  # fmt: skip
    told = done.stderr.strip()
    print(told)
    if done.returncode != EXIT_NO_DEVICE or "device cuda:0 is not there" not in told:
        sys.exit(f"cuda: without a GPU the program exited with {done.returncode} and did not say that no device is there")
    print("cuda: without a GPU the program says so and exits with 3")


if __name__ == "__main__":
    main()
