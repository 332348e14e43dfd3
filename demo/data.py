"""Documents in, a tokenizer and streams of tokens out."""

import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import chat
from corpus import KINDS, Document

# The share of training tokens per kind, as plain text and as conversations. The kinds are
# nearer to equal than their sizes are: routing should see seven kinds, not mostly one.
PLAIN_SHARE = dict(zip(KINDS, [0.11, 0.11, 0.14, 0.07, 0.13, 0.08, 0.11], strict=True))
CHAT_SHARE = dict(zip(KINDS, [0.035, 0.03, 0.07, 0.04, 0.025, 0.025, 0.025], strict=True))


def train_tokenizer(documents: list[Document], vocabulary: int, path: Path) -> Tokenizer:
    """Byte-level BPE, learned from as much of every kind."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=chat.SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    shuffled = random.Random(0).sample(documents, len(documents))
    texts = []
    for kind in KINDS:
        left = 1_500_000
        for document in shuffled:
            if document.kind == kind and left > 0:
                texts.append(document.plain())
                left -= len(texts[-1])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return tokenizer


def conversations(documents: list[Document], rounds: int) -> list[str]:
    """Every document begins `rounds` conversations, each time asked differently."""
    source = random.Random(1)
    texts = []
    for _ in range(rounds):
        order = source.sample(documents, len(documents))
        texts += [chat.conversation(order[i : i + 2], source) for i in range(len(order))]
    return texts


def stream(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """The texts in random order as one row of tokens, each after an end-of-text token."""
    shuffled = random.Random(2).sample(texts, len(texts))
    pieces = [np.array([0] + e.ids, np.int16) for e in tokenizer.encode_batch_fast(shuffled)]
    return torch.from_numpy(np.concatenate(pieces))


def streams(tokenizer: Tokenizer, documents: list[Document], path: Path) -> dict[str, torch.Tensor]:
    """Tokens per kind: 'python' is its plain text, 'python chat' its conversations."""
    if not path.exists():
        rows = {}
        for kind in KINDS:
            of_kind = [d for d in documents if d.kind == kind]
            rows[kind] = stream(tokenizer, [d.plain() for d in of_kind])
            # Few documents, as of the novels, still make many different conversations.
            rounds = max(1, 20_000 // len(of_kind))
            rows[f"{kind} chat"] = stream(tokenizer, conversations(of_kind, rounds))
        torch.save(rows, path)
    return torch.load(path)


class Batches:
    """Windows at random places of randomly chosen streams; step n is the same in every run."""

    def __init__(self, rows: dict[str, torch.Tensor], tokens: int, seed: int):
        self.rows = list(rows.values())
        share = [(CHAT_SHARE if "chat" in n else PLAIN_SHARE)[n.removesuffix(" chat")] for n in rows]
        self.share = torch.tensor(share)
        self.tokens, self.seed = tokens, seed

    def __getitem__(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + step)
        # Every fourth batch has windows of 512, so that later positions are trained too.
        length = 512 if step % 4 == 3 else 256
        count = self.tokens // length
        chosen = torch.multinomial(self.share, count, replacement=True, generator=generator)
        windows = []
        for row in (self.rows[i] for i in chosen.tolist()):
            start = int(torch.randint(len(row) - length, (), generator=generator))
            windows.append(row[start : start + length + 1].long())
        return torch.stack(windows)
