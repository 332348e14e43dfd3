#!/usr/bin/env python3
"""Benefit of dealing experts to groups by which ones tokens use together.

    remoe record demo/model --prompts train.jsonl --out train.npy --tokens --max-tokens 48
    python3 bench/affinity.py --train train.npy --test test.npy

Plans deal a layer's remote experts to groups by mean load, the longest first. Here swaps of two experts follow, which
keep every load within 10 % of that, for as long as they lower one of these in the training records: the groups that a
token calls (messages), the experts of a token in the group that has most of them (slowest), or how much the shares of
requests that meet in a group rise and fall together (requests: counts per request are enough for it). Printed are
messages and slowest for each token of the test records, in the mean over layers. Needs NumPy and records with
`--tokens`.
"""

import argparse
import json
from itertools import combinations

import numpy as np

SLACK = 0.1


def read(path):
    with open(path, "rb") as file:
        header = json.loads(np.load(file).tobytes())
        records = [np.load(file) for _ in iter(lambda: file.peek(1), b"")]
    return header, [np.asarray(record["experts"], dtype=np.int64) for record in records]


def used(records, layer, experts):
    """Whether each token uses each expert."""
    chosen = np.concatenate([record[layer] for record in records])
    table = np.zeros((len(chosen), experts), dtype=np.int64)
    np.put_along_axis(table, chosen, 1, axis=1)
    return table


def seen(table, groups):
    """Groups that a token calls, and its experts in the group with most of them."""
    counts = np.stack([table[:, group].sum(axis=1) for group in groups], axis=1)
    return (counts > 0).sum(axis=1).mean(), counts.max(axis=1).mean()


def longest_first(load, chosen, count):
    groups, sums = [[] for _ in range(count)], [0] * count
    for expert in sorted(chosen, key=lambda expert: -load[expert]):
        least = sums.index(min(sums))
        groups[least].append(expert)
        sums[least] += load[expert]
    return groups


def swapped(groups, load, value):
    """The groups after the best swap, again and again while `value` falls."""
    most = (1 + SLACK) * max(load[group].sum() for group in groups)
    best = value(groups)
    while True:
        found = None
        for one, other in combinations(range(len(groups)), 2):
            for here in range(len(groups[one])):
                for there in range(len(groups[other])):
                    changed = [list(group) for group in groups]
                    changed[one][here], changed[other][there] = groups[other][there], groups[one][here]
                    if max(load[changed[one]].sum(), load[changed[other]].sum()) > most:
                        continue
                    less = value(changed)
                    if less < best - 1e-12:
                        best, found = less, changed
        if found is None:
            return groups
        groups = found


def together(records, layer, experts):
    """How experts' shares of requests vary together."""
    shares = np.stack([np.bincount(record[layer].ravel(), minlength=experts) / record[layer].size for record in records])
    return np.cov(shares, rowvar=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    args = parser.parse_args()
    header, train = read(args.train)
    _, test = read(args.test)
    experts, layers = header["experts"], train[0].shape[0]
    tables = [(used(train, layer, experts), used(test, layer, experts)) for layer in range(layers)]
    print(f"{layers} layers, {len(train)} training requests, {len(test)} test requests with {len(tables[0][1])} tokens")
    print("remote  groups  dealt by  messages           slowest")
    for remote in (experts, experts // 2):
        for count in (2, 4):
            rows = {name: [] for name in ("load", "messages", "slowest", "requests")}
            for layer, (known, held) in enumerate(tables):
                load = known.sum(axis=0)
                dealt = longest_first(load, sorted(range(experts), key=lambda expert: load[expert])[:remote], count)
                vary = together(train, layer, experts)
                values = {
                    "messages": lambda groups: seen(known, groups)[0],
                    "slowest": lambda groups: seen(known, groups)[1],
                    "requests": lambda groups: sum(vary[np.ix_(group, group)].sum() for group in groups),
                }
                rows["load"].append(seen(held, dealt))
                for name, value in values.items():
                    rows[name].append(seen(held, swapped(dealt, load, value)))
            usual = np.mean(rows["load"], axis=0)
            for name, row in rows.items():
                own = np.mean(row, axis=0)
                change = own / usual - 1
                print(f"{remote:6}  {count:6}  {name:8}  {own[0]:.3f} ({change[0]:+6.1%})   {own[1]:.3f} ({change[1]:+6.1%})")


if __name__ == "__main__":
    main()
