"""Trains the demo model and writes it as a Hugging Face folder.

    python demo/train.py --out demo/model

Run again after an interruption, it goes on from the last checkpoint in the cache.
"""

import argparse
import ctypes
import json
import math
import os
import random
import time
from pathlib import Path

# Threads that wait for each other soon sleep instead of spinning, so that training shares a
# busy machine well. The library reads this while it loads.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import GenerationConfig, MixtralConfig, PreTrainedTokenizerFast

import chat
import corpus
import data
from network import CONFIG, Network

SEED = 7
BATCH_TOKENS = 4096
PEAK_RATE, LAST_RATE, WARMUP_STEPS = 3e-3, 3e-5, 200
WEIGHT_DECAY = 0.1
# Balanced while the experts form, then left to specialise: see `balance_weight`.
FIRST_BALANCE, LAST_BALANCE = 0.01, 0.001
CHECKPOINT_SECONDS = 180


def keep_freed_memory():
    """Tells glibc to reuse large blocks: giving them back after every step costs a quarter of the time."""
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    for parameter, value in [(mmap_threshold, 1 << 30), (trim_threshold, (1 << 31) - 1), (top_pad, 1 << 29)]:
        mallopt(parameter, value)


def learning_rate(step: int, progress: float) -> float:
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2


def balance_weight(progress: float) -> float:
    """Constant for the first half, then falling in a straight line."""
    return FIRST_BALANCE + (LAST_BALANCE - FIRST_BALANCE) * max(0.0, 2 * progress - 1)


def optimizer_for(network: Network) -> torch.optim.AdamW:
    """Weight decay for matrices only: norms have a natural scale."""
    parameters = list(network.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def loss_of(network: Network, windows: torch.Tensor):
    with torch.autocast("cpu", torch.bfloat16):
        logits, balance, counts = network(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten()), balance, counts


@torch.no_grad()
def held_out_losses(network: Network, rows: dict[str, torch.Tensor], windows: int) -> dict[str, float]:
    """Mean loss per token and stream, over the first windows of text that is never trained on."""
    losses = {}
    for name, row in rows.items():
        count = min(windows, (len(row) - 1) // 256)
        stacked = row[: count * 256 + 1].long().unfold(0, 257, 256)
        losses[name] = loss_of(network, stacked)[0].item()
    return losses


def export(network: Network, tokenizer: Tokenizer, out: Path):
    out.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: another process may be reading the folder.
    save_file(network.hub_tensors(), out / "model.safetensors.partial", metadata={"format": "pt"})
    (out / "model.safetensors.partial").chmod(0o644)
    (out / "model.safetensors.partial").rename(out / "model.safetensors")

    end_of_text, end = (tokenizer.token_to_id(token) for token in (chat.END_OF_TEXT, chat.END))
    tokens = {"bos_token_id": end_of_text, "pad_token_id": end_of_text, "eos_token_id": [end, end_of_text]}
    shape = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    MixtralConfig(
        **shape,
        **tokens,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG["rope_theta"]},
        tie_word_embeddings=True,
        router_aux_loss_coef=LAST_BALANCE,
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(out)
    GenerationConfig(**tokens, do_sample=True, temperature=0.7, top_p=0.9).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=chat.END_OF_TEXT,
        pad_token=chat.END_OF_TEXT,
        eos_token=chat.END,
        additional_special_tokens=[chat.SYSTEM, chat.USER, chat.ASSISTANT],
        chat_template=chat.TEMPLATE,
        model_max_length=CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)


def prepare(cache: Path):
    """Tokenizer, training streams and held-out streams, all made once."""
    documents = corpus.documents(cache)
    trained = [d for d in documents if not d.held_out]
    held_out = [d for d in documents if d.held_out]
    tokenizer = data.train_tokenizer(trained, CONFIG["vocab_size"], cache / "tokenizer.json")
    rows = data.streams(tokenizer, trained, cache / "trained.pt")
    return tokenizer, rows, data.streams(tokenizer, held_out, cache / "held-out.pt")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    arguments.add_argument("--cache", type=Path, default=Path(__file__).parent / ".cache")
    arguments.add_argument("--tokens", type=float, default=36e6, help="tokens to train on (default: 36e6)")
    arguments.add_argument("--minutes", type=float, default=math.inf, help="end after so long, if that is sooner")
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()

    keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    random.seed(SEED)
    options.cache.mkdir(parents=True, exist_ok=True)
    tokenizer, rows, held_out = prepare(options.cache)
    for name, row in rows.items():
        print(f"{name:16} {len(row):>9} tokens, {len(held_out[name])} held out", flush=True)

    network = Network(CONFIG)
    optimizer = optimizer_for(network)
    step, seconds, log = 0, 0.0, []
    checkpoint = options.cache / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        step, seconds, log = saved["step"], saved["seconds"], saved["log"]
        print(f"going on at step {step}", flush=True)

    def save():
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"step": step, "seconds": seconds, "log": log}
        torch.save(state, checkpoint.with_suffix(".partial"))
        checkpoint.with_suffix(".partial").rename(checkpoint)
        export(network, tokenizer, options.out)

    batches = data.Batches(rows, BATCH_TOKENS, SEED)
    recent = []
    last = saved_at = time.monotonic()
    # The schedules follow whichever budget is used up further, so that both end with them.
    while (progress := max(step * BATCH_TOKENS / options.tokens, seconds / 60 / options.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        loss, balance, _ = loss_of(network, batches[step])
        (loss + balance_weight(progress) * balance).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append((loss.item(), balance.item()))

        step += 1
        now = time.monotonic()
        seconds, last = seconds + now - last, now
        if step % 50 == 0:
            entry = {"tokens": step * BATCH_TOKENS, "seconds": seconds, "progress": progress}
            entry["loss"], entry["balance"] = (sum(column) / len(recent) for column in zip(*recent, strict=True))
            recent = []
            if step % 250 == 0:
                entry["held_out"] = held_out_losses(network, {k: held_out[k] for k in corpus.KINDS}, windows=24)
            log.append(entry)
            print(f"step {step} {json.dumps(entry)}", flush=True)
        if now - saved_at > CHECKPOINT_SECONDS:
            saved_at = now
            save()
    save()
    (options.cache / "log.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main()
