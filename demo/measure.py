"""What the finished model does: losses, routing and samples, measured on the exported folder."""

import json
import random
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import chat
import corpus
from corpus import KINDS

WINDOW = 256
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
# At most so many windows per stream; the smallest kind has fewer.
WINDOWS = 96


def load(folder: Path):
    # In float32, so that figures do not depend on how a machine multiplies in bfloat16.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def routed(logits: tuple[torch.Tensor, ...], chosen: int) -> torch.Tensor:
    """How many tokens each (layer, expert) got, from the router logits of every layer."""
    experts = logits[0].shape[-1]
    return torch.stack([torch.bincount(l.topk(chosen).indices.flatten(), minlength=experts) for l in logits])


@torch.no_grad()
def held_out(model, rows: dict[str, torch.Tensor]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Loss per token of every stream, and the experts' share of each plain kind."""
    losses, shares = {}, {}
    for name, row in rows.items():
        windows = row.long().unfold(0, WINDOW + 1, WINDOW)[:WINDOWS]
        loss, counts = 0.0, 0
        for batch in windows.split(16):
            out = model(batch[:, :-1], output_router_logits=True)
            loss += F.cross_entropy(out.logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
            counts = counts + routed(out.router_logits, model.config.num_experts_per_tok)
        losses[name] = loss / windows[:, 1:].numel()
        if name in KINDS:
            shares[name] = counts / counts.sum(1, keepdim=True)
    return losses, shares


@torch.no_grad()
def losses_by_position(model, rows: dict[str, torch.Tensor]) -> list[float]:
    """Loss per token in every eighth of the longest context, over all kinds that have such long texts."""
    length = model.config.max_position_embeddings
    losses = []
    for kind in set(KINDS) - {"dictionary"}:
        windows = rows[kind].long().unfold(0, length + 1, length)[:8]
        logits = model(windows[:, :-1]).logits.transpose(1, 2)
        losses.append(F.cross_entropy(logits, windows[:, 1:], reduction="none"))
    return torch.cat(losses).mean(0).view(8, -1).mean(1).tolist()


@torch.no_grad()
def prompt_shares(model, tokenizer, prompts: list[dict]) -> dict[str, torch.Tensor]:
    """The experts' share of the example prompts of each kind, each as the first turn of a chat."""
    totals = dict.fromkeys(KINDS, 0)
    for entry in prompts:
        ids = chat_ids(tokenizer, entry["prompt"])
        out = model(ids, output_router_logits=True)
        totals[entry["kind"]] = totals[entry["kind"]] + routed(out.router_logits, model.config.num_experts_per_tok)
    return {kind: counts / counts.sum(1, keepdim=True) for kind, counts in totals.items()}


def busiest(share: torch.Tensor, count: int) -> torch.Tensor:
    """Per layer, what part of the work the `count` busiest experts do."""
    return share.topk(count).values.sum(-1)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over layers of the part of the work that would have to move: 0 is alike, 1 disjoint."""
    return ((one - other).abs().sum(-1) / 2).mean().item()


def chat_ids(tokenizer, prompt: str) -> torch.Tensor:
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


def answer(model, tokenizer, prompt: str, tokens: int, **settings) -> str:
    set_seed(1)
    ids = chat_ids(tokenizer, prompt)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **settings)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False)


def finished(model, tokenizer, prompts: list[dict]) -> int:
    """How many sampled answers end by themselves within 300 tokens."""
    answers = (answer(model, tokenizer, entry["prompt"], 300, **SAMPLED) for entry in prompts)
    return sum(text.endswith((chat.END, chat.END_OF_TEXT)) for text in answers)


def example_prompts(cache: Path) -> list[dict]:
    """Six prompts per kind from documents that are never trained on."""
    source = random.Random(11)
    documents = corpus.documents(cache)
    # A word of several synsets may have been defined in training.
    senses = Counter(w for d in documents if d.kind == "dictionary" for w in d.title.split(", "))
    prompts = []
    for kind in KINDS:
        candidates = [d for d in documents if d.kind == kind and d.held_out and 3 <= len(d.title) <= 60]
        if kind == "dictionary":
            single = [d for d in candidates if d.title.isalpha() and d.title.islower() and senses[d.title] == 1]
            candidates = [d for d in single if d.body.startswith("noun") and len(d.body) > 60]
        source.shuffle(candidates)
        asked = []
        for document in candidates * 6:
            # Half continuations, half questions; a dictionary is only asked, a novel only continued.
            if len(asked) < {"dictionary": 0, "novel": 6}.get(kind, 3):
                pair = chat.continuation(document, source)
                if pair is None or len(pair[0]) < 80:
                    continue
            else:
                pair = chat.question(document, source)
            # Requests like "Write scripture." are of no document and were trained on.
            if pair[0] not in asked + chat.QUESTIONS[kind]:
                asked.append(pair[0])
            if len(asked) == 6:
                break
        prompts += [{"kind": kind, "prompt": prompt} for prompt in asked]
    return prompts


def write_prompts(path: Path, prompts: list[dict]):
    path.write_text("".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts))
