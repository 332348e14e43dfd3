"""Writes the model card, its two pictures and the example prompts.

    python demo/card.py --model demo/model

Every figure and sample in the card is measured on the exported folder.
"""

import argparse
import json
from pathlib import Path
from urllib.parse import unquote

import matplotlib
import torch

import corpus
import measure
from corpus import KINDS, PACKAGES
from train import BATCH_TOKENS, FIRST_BALANCE, LAST_BALANCE, PEAK_RATE, SEED

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402 - the backend is chosen first

HERE = Path(__file__).parent
# Pictures that differ only where the model does.
pyplot.rcParams |= {"svg.hashsalt": "demo", "font.size": 9, "svg.fonttype": "none"}

CONTENTS = {
    "scripture": ("King James Bible", "public domain (in the United Kingdom the Crown holds a printing patent)"),
    "novel": ("Jane Austen's six novels", "public domain; the collection MIT, © 2016-2017 Julia Silge"),
    "dictionary": (
        "WordNet 3.0",
        "WordNet licence (permissive): WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.",
    ),
    "jargon": ("the Jargon File 4.4.7", "public domain"),
    "python": (
        "manual of Python 3.11",
        "PSF licence 2: Copyright © 2001-2023 Python Software Foundation; All Rights Reserved",
    ),
    "rust": (
        "the Rust book, reference, Rust by Example, Rustonomicon, edition guide, rustc and rustdoc books",
        "MIT or Apache-2.0, The Rust Project Developers",
    ),
    "sql": (
        "manual of PostgreSQL 15",
        "PostgreSQL licence: Portions Copyright © 1996-2026, PostgreSQL Global Development Group; "
        "Portions Copyright © 1994, The Regents of the University of California",
    ),
}


def version(cache: Path, package: str) -> str:
    (archive,) = (cache / "archives").glob(f"{package}_*.deb")
    return unquote(archive.name.split("_")[1]).split(":")[-1]


def save(figure, path: Path):
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_losses(log: list[dict], path: Path):
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot([e["tokens"] / 1e6 for e in log], [e["loss"] for e in log], color="0.6", lw=0.8, label="training")
    measured = [e for e in log if "held_out" in e]
    for kind in KINDS:
        axes.plot([e["tokens"] / 1e6 for e in measured], [e["held_out"][kind] for e in measured], label=kind)
    axes.set(xlabel="million tokens", ylabel="nats per token", ylim=(2, 7))
    axes.legend(ncols=2, frameon=False, title="held out, and training")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def draw_experts(shares: dict[str, torch.Tensor], path: Path):
    layers, experts = next(iter(shares.values())).shape
    figure, panels = pyplot.subplots(2, (layers + 1) // 2, figsize=(9, 4.2), layout="constrained", sharey=True)
    for layer, axes in enumerate(panels.flat):
        cells = torch.stack([shares[kind][layer] for kind in KINDS]).numpy()
        image = axes.imshow(cells, vmin=0, vmax=4 / experts, cmap="magma_r", aspect="auto")
        axes.set(title=f"layer {layer}", xticks=range(0, experts, 3), yticks=range(len(KINDS)), yticklabels=KINDS)
    bar = figure.colorbar(image, ax=panels, label="share of the work", ticks=[i / experts for i in range(5)])
    bar.set_ticklabels(["0", "even", "2 × even", "3 × even", "4 × or more"])
    save(figure, path)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sources(cache: Path) -> str:
    documents = corpus.documents(cache)
    rows = []
    for kind in KINDS:
        title, licence = CONTENTS[kind]
        size = sum(len(d.plain().encode()) for d in documents if d.kind == kind) / 1e6
        package = PACKAGES[kind][-1]
        rows.append([kind, title, f"{package} {version(cache, package)}", f"{size:.1f}", licence])
    return table(["kind", "text", "Debian package", "MB", "licence of the text"], rows)


def loss_table(losses: dict[str, float], rows: dict[str, torch.Tensor], tokenizer) -> str:
    header = ["kind", "plain text, nats per token", "the same, bits per byte", "conversations, nats per token"]
    lines = []
    for kind in KINDS:
        row = rows[kind]
        bytes_per_token = len(tokenizer.decode(row).encode()) / len(row)
        bits = losses[kind] / bytes_per_token / 0.6931
        lines.append([kind, f"{losses[kind]:.2f}", f"{bits:.2f}", f"{losses[f'{kind} chat']:.2f}"])
    return table(header, lines)


def skew_table(shares: dict[str, torch.Tensor]) -> str:
    everything = torch.stack(list(shares.values())).mean(0)
    rows = []
    for name, share in [*shares.items(), ("all kinds together", everything)]:
        top = measure.busiest(share, 4)
        rows.append(
            [
                name,
                f"{top.mean():.0%}",
                f"{top.min():.0%} to {top.max():.0%}",
                f"{share.max():.0%}",
                f"{share.min():.1%}",
                f"{measure.distance(share, everything):.0%}",
            ]
        )
    header = ["kind", "4 busiest of 16", "by layer", "busiest expert", "idlest expert", "differs from all by"]
    return table(header, rows)


def pair_table(shares: dict[str, torch.Tensor]) -> str:
    rows = [[one, *(f"{measure.distance(shares[one], shares[other]):.0%}" for other in KINDS)] for one in KINDS]
    return table(["", *KINDS], rows)


def samples(model, tokenizer, prompts: list[dict]) -> str:
    parts = []
    for kind in KINDS:
        of_kind = [entry["prompt"] for entry in prompts if entry["kind"] == kind]
        # The first continuation and the last question of the kind.
        for prompt in [of_kind[0], of_kind[-1]]:
            greedy = measure.answer(model, tokenizer, prompt, 100, do_sample=False)
            sampled = measure.answer(model, tokenizer, prompt, 100, **measure.SAMPLED)
            parts.append(f"**{kind}**\n\n```text\n{prompt}\n\n--- greedy\n{greedy}\n\n--- sampled\n{sampled}\n```")
    return "\n\n".join(parts)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", type=Path, default=HERE / "model")
    arguments.add_argument("--cache", type=Path, default=HERE / ".cache")
    options = arguments.parse_args()

    model, tokenizer = measure.load(options.model)
    log = json.loads((options.cache / "log.json").read_text())
    rows = torch.load(options.cache / "held-out.pt")
    prompts = measure.example_prompts(options.cache)
    measure.write_prompts(HERE / "prompts.jsonl", prompts)
    losses, shares = measure.held_out(model, rows)
    asked = measure.prompt_shares(model, tokenizer, prompts)
    positions = measure.losses_by_position(model, rows)
    draw_losses(log, options.model / "loss.svg")
    draw_experts(shares, options.model / "experts.svg")

    text = (HERE / "card.md").read_text()
    figures = {
        "parameters": f"{model.num_parameters() / 1e6:.2f}",
        "tokens": f"{log[-1]['tokens'] / 1e6:.1f}",
        "minutes": f"{log[-1]['seconds'] / 60:.0f}",
        "loss": f"{log[-1]['loss']:.2f}",
        "steps": f"{log[-1]['tokens'] // BATCH_TOKENS}",
        "batch": str(BATCH_TOKENS),
        "rate": str(PEAK_RATE),
        "seed": str(SEED),
        "first_balance": str(FIRST_BALANCE),
        "last_balance": str(LAST_BALANCE),
        "sources": sources(options.cache),
        "losses": loss_table(losses, rows, tokenizer),
        "skew": skew_table(shares),
        "pairs": pair_table(shares),
        "prompt_skew": skew_table(asked),
        "early": f"{sum(positions[:4]) / 4:.2f}",
        "beyond": f"{positions[4]:.2f}",
        "latest": f"{positions[7]:.2f}",
        "prompts": str(len(prompts)),
        "finished": str(measure.finished(model, tokenizer, prompts)),
        "samples": samples(model, tokenizer, prompts),
    }
    for name, value in figures.items():
        text = text.replace("{{" + name + "}}", value)
    (options.model / "README.md").write_text(text)


if __name__ == "__main__":
    main()
