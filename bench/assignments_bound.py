#!/usr/bin/env python3
"""Share of recorded prompts within the bound on assignments (crates/remoe-planner/src/hoeffding.rs).

    python3 bench/assignments_bound.py --train train.npy --test test-*.npy

For every number of remote experts the remote set of each layer is chosen as plans choose it, from the
mean of the training records: the experts that are used least. A prompt keeps the bound in a layer when
the set receives no more of the prompt's assignments than the bound allows. Needs NumPy.
"""

import argparse
import json
import math

import numpy as np


def read(path):
    with open(path, "rb") as file:
        header = json.loads(np.load(file).tobytes())
        records = [np.load(file) for _ in iter(lambda: file.peek(1), b"")]
    return header, records


def bound(tokens, chosen, top_k, experts):
    per_token = min(chosen, top_k)
    return min(tokens * per_token, chosen * tokens * top_k / experts + math.sqrt(tokens * per_token * math.log(20) / 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True, nargs="+")
    args = parser.parse_args()
    header, train = read(args.train)
    experts, top_k = header["experts"], header["top_k"]
    counts = np.sum([record["prefill"] for record in train], axis=0, dtype=np.int64).reshape(-1, experts)
    order = np.argsort(counts, axis=1, kind="stable")
    tests = [np.asarray(record["prefill"]).reshape(-1, experts) for path in args.test for record in read(path)[1]]
    print(f"{len(tests)} prompts, {order.shape[0]} layers; share of (prompt, layer) within the bound")
    print("remote  predicted least  most used instead  mean load / bound")
    for chosen in range(1, experts + 1):
        held = {"least": 0, "most": 0}
        load = []
        for prompt in tests:
            for layer, row in enumerate(prompt):
                allowed = bound(row.sum() / top_k, chosen, top_k, experts)
                least = row[order[layer, :chosen]].sum()
                held["least"] += least <= allowed
                held["most"] += row[order[layer, -chosen:]].sum() <= allowed
                load.append(least / allowed if allowed else 0)
        cells = len(tests) * order.shape[0]
        print(f"{chosen:6}  {held['least'] / cells:15.1%}  {held['most'] / cells:17.1%}  {np.mean(load):17.2f}")


if __name__ == "__main__":
    main()
