"""The prompts that activation prediction is measured with: seven kinds of text, train and test apart.

    python demo/prompt_set.py

writes `prompts/train.jsonl.gz` (all kinds, shuffled) and `prompts/test-KIND.jsonl.gz`, one object
{"kind", "prompt"} a line. No document gives prompts to both sides. The same packages give the same
files: every choice follows from SHA-256 of the text.
"""

import argparse
import gzip
import hashlib
import json
from pathlib import Path

import corpus

HERE = Path(__file__).resolve().parent

# The Remoe paper takes 5,000 and 500 prompts, the first 500 characters of each.
TRAIN, TEST = 720, 80
CHARACTERS = 500
# One document in eight is for tests.
TEST_SHARE = 32


def digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode()).digest()


def pieces(document: corpus.Document) -> list[str]:
    """The document as it begins, then as it goes on from later paragraphs, none overlapping."""
    found, piece = [], ""
    for paragraph in document.plain().split("\n"):
        piece = f"{piece}\n{paragraph}" if piece else paragraph
        if len(piece) >= CHARACTERS:
            found.append(piece[:CHARACTERS])
            piece = ""
    # What is left is a piece if it is the whole document.
    return found or [piece]


def prompts(documents: list[corpus.Document], kind: str, test: bool, count: int) -> list[dict]:
    """`count` pieces, taken in turn from the documents: their first ones before their second ones."""
    chosen = [d for d in documents if d.kind == kind and (digest("side", kind, d.title)[0] < TEST_SHARE) == test]
    chosen.sort(key=lambda d: digest("order", kind, d.title, d.body))
    ranked = [(turn, index, text) for index, d in enumerate(chosen) for turn, text in enumerate(pieces(d))]
    # Equal prompts (editions of one manual) count once.
    unique = {text.strip(): None for _, _, text in sorted(ranked) if text.strip()}
    texts = list(unique)[:count]
    if len(texts) < count:
        raise SystemExit(f"{kind}: {len(texts)} prompts where {count} are needed")
    return [{"kind": kind, "prompt": text} for text in texts]


def write(path: Path, rows: list[dict]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # Without a name and a time inside, the same rows are the same bytes.
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{path}: {len(rows)} prompts, {path.stat().st_size:,} bytes")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cache", type=Path, default=HERE / ".cache", help="where packages are unpacked")
    arguments.add_argument("--out", type=Path, default=HERE / "prompts")
    options = arguments.parse_args()
    documents = corpus.documents(options.cache)
    options.out.mkdir(parents=True, exist_ok=True)
    train = [row for kind in corpus.KINDS for row in prompts(documents, kind, False, TRAIN)]
    write(options.out / "train.jsonl.gz", sorted(train, key=lambda row: digest("shuffle", row["prompt"])))
    for kind in corpus.KINDS:
        write(options.out / f"test-{kind}.jsonl.gz", prompts(documents, kind, True, TEST))


if __name__ == "__main__":
    main()
