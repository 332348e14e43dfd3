"""The folder outside of checkouts that keeps what is expensive to make: dependency artefacts, tools, LibTorch, the
programs of the test cluster. Everything in it can be deleted at any time, and is made again.
"""

import os
from pathlib import Path


def root() -> Path:
    """$REMOE_CACHE, else $XDG_CACHE_HOME/remoe, else ~/.cache/remoe."""
    if chosen := os.environ.get("REMOE_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "remoe"
