#!/usr/bin/env python3
"""Dumps what a model's routers see and choose, for gate_lookahead.rs.

    python predictor/examples/hidden_states.py demo/model states.safetensors train.jsonl --prompts 280

Of all lines of the prompt files, --prompts evenly spaced ones are run through Hugging Face transformers in
float32. The file holds, for L layers with experts and T tokens:

    states   float32 [L, T, hidden]  the residual stream in front of the norm before the experts
    experts  uint16  [L, T, top_k]   what the router chose, ascending
    norms    float32 [L, hidden]     weight of that norm
    gates    float32 [L, experts, hidden]  the router

and in its metadata the norm's `epsilon`. For models whose layers are built as Mixtral's: a `mlp.gate`
whose output ends with the chosen experts, after a `post_attention_layernorm`. Needs torch, transformers
and safetensors as in demo/requirements.txt.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", type=Path, help="folder of a Hugging Face checkpoint")
parser.add_argument("out", type=Path, help="file to write")
parser.add_argument("files", type=Path, nargs="+", help='lines of {"prompt": ".."}')
parser.add_argument("--prompts", type=int, required=True, help="prompts to run")
options = parser.parse_args()

lines = [line for file in options.files for line in file.read_text().splitlines()]
if not 1 <= options.prompts <= len(lines):
    parser.error(f"--prompts is {options.prompts}: the files hold {len(lines)} prompts")
chosen = [json.loads(lines[index * len(lines) // options.prompts])["prompt"] for index in range(options.prompts)]

tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
layers = [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]
states = [[] for _ in layers]
experts = [[] for _ in layers]
for layer, seen, routed in zip(layers, states, experts):
    layer.post_attention_layernorm.register_forward_pre_hook(
        lambda _, inputs, seen=seen: seen.append(inputs[0].flatten(0, 1))
    )
    layer.mlp.gate.register_forward_hook(
        lambda _, inputs, output, routed=routed: routed.append(output[-1].sort(dim=-1).values)
    )
with torch.inference_mode():
    for prompt in chosen:
        model(**tokenizer(prompt, return_tensors="pt"))

norms = [layer.post_attention_layernorm for layer in layers]
tensors = {
    "states": torch.stack([torch.cat(seen) for seen in states]),
    "experts": torch.stack([torch.cat(routed) for routed in experts]).to(torch.uint16),
    "norms": torch.stack([norm.weight.detach() for norm in norms]),
    "gates": torch.stack([layer.mlp.gate.weight.detach() for layer in layers]),
}
save_file(tensors, options.out, metadata={"epsilon": repr(norms[0].variance_epsilon)})
print({name: tuple(tensor.shape) for name, tensor in tensors.items()})
