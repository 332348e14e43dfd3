"""The expert FFN in torch's bfloat16, its weights packed by oneDNN: the peer of Remoe's kernels.

Driven by `remoe-bench`, as crates/remoe-kernels/examples/ffn_speed is: the first line on standard output describes
the peer, then each line on standard input names a measurement and is answered by a line
{"rate": .., "best": ..} in GB/s of weights or GFLOP/s; best is that of the fastest single expert.

  one        1 token, packed weights
  many       256 tokens, packed weights
  one_plain  1 token, weights as they are stored: how much slower shows that packing is in force

Usage: torch_expert.py THREADS HIDDEN WIDTH
"""

import json
import sys
import time

try:
    import torch
except ModuleNotFoundError:
    sys.exit("torch_expert.py: missing torch")

# As ffn_speed does: enough weights that they come from memory, a quarter of them for many tokens.
WEIGHT_BYTES = 400 << 20
TOKENS = 256

linear = torch.ops.mkldnn._linear_pointwise


def packed_expert(x, weights):
    """What torch.compile with freezing makes of the expert: activation and product fused."""
    gate, up, down = weights
    gated = linear(x, gate, None, "swish", [], "")
    return linear(linear.binary(x, gated, up, None, "mul"), down, None, "none", [], "")


def plain_expert(x, weights):
    gate, up, down = weights
    functional = torch.nn.functional
    return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)


def pack(weights, tokens):
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, tokens) for weight in weights]
    if not all(weight.is_mkldnn for weight in packed):
        sys.exit("cannot pack weights: oneDNN packed nothing")
    return packed


def check(x, packed, weights):
    expected = plain_expert(x.float(), [weight.float() for weight in weights])
    error = (packed_expert(x, packed).float() - expected).norm() / expected.norm()
    if not error < 0.02:
        sys.exit(f"wrong result of the packed expert: differs from the plain one by {error}")


def main():
    threads, hidden, width = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    size = 3 * hidden * width * 2
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    experts = [
        [(torch.randn(shape) / shape[1] ** 0.5).bfloat16() for shape in shapes]
        for _ in range(-(-WEIGHT_BYTES // size))
    ]
    few = experts[: -(-len(experts) // 4)]
    inputs = {tokens: torch.randn(tokens, hidden).bfloat16() for tokens in (1, TOKENS)}
    flops = 6 * hidden * width * TOKENS
    measurements = {
        "one": (packed_expert, [pack(weights, 1) for weights in experts], inputs[1], size),
        "many": (packed_expert, [pack(weights, TOKENS) for weights in few], inputs[TOKENS], flops),
        "one_plain": (plain_expert, experts, inputs[1], size),
    }
    for tokens, name in ((1, "one"), (TOKENS, "many")):
        check(inputs[tokens], measurements[name][1][0], experts[0])
    for expert, all_weights, x, _ in measurements.values():
        for weights in all_weights:
            expert(x, weights)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)

    for line in sys.stdin:
        expert, all_weights, x, work = measurements[line.strip()]
        times = []
        for weights in all_weights:
            start = time.perf_counter()
            expert(x, weights)
            times.append(time.perf_counter() - start)
        rate = work * len(times) / sum(times) / 1e9
        print(json.dumps({"rate": rate, "best": work / min(times) / 1e9}), flush=True)


with torch.inference_mode():
    main()
