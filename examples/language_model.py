"""A character language model on Python's own docstrings, with linear_cross_entropy.

    python examples/language_model.py

The text is the docstrings of Python's standard library, so nothing is downloaded (it differs
slightly between Python versions). A network with one hidden layer reads 16 characters and predicts
the next.
`powergrad.linear_cross_entropy` computes the last layer and the loss together and never holds the
logits of the whole batch. The script compares cross-entropy with PowerGrad Transform (PGT); the
learning rate is tuned for both.

PGT fits ``softmax(alpha * z)``, so a network trained with PGT is overconfident at temperature 1.
The script therefore reports bits per character at temperature 1 and at 1/alpha. For cross-entropy
the two are the same. The learning rate is tuned for the bits at 1/alpha.
"""

from __future__ import annotations

import ast
import functools
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from comparison import arguments, compare
from torch import Tensor, nn

from powergrad import linear_cross_entropy

CONTEXT, BATCH = 16, 512


@functools.cache
def corpus() -> tuple[dict[str, Tensor], int]:
    """The docstrings as character indices: a tenth of the modules each for val and test."""
    texts = {"train": "", "val": "", "test": ""}
    for i, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = (ast.get_docstring(n) for n in nodes if isinstance(n, documented))
        split = {8: "val", 9: "test"}.get(i % 10, "train")
        texts[split] += "\n\n".join(filter(None, docstrings)) + "\n\n"
    characters = sorted({c for c in texts["train"] if c.isascii()})
    index = {c: i + 1 for i, c in enumerate(characters)}  # 0 is any other
    encoded = {s: torch.tensor([index.get(c, 0) for c in text]) for s, text in texts.items()}
    return encoded, len(characters) + 1


class Model(nn.Module):
    """Characters (N, 16) to hidden states (N, 128). The loss applies the head."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 16)
        self.hidden = nn.Linear(16 * CONTEXT, 128)
        self.head = nn.Linear(128, characters)

    def forward(self, context: Tensor) -> Tensor:
        """Hidden states."""
        return F.gelu(self.hidden(self.embedding(context).flatten(1)))


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Contexts (N, 16) and the character after each."""
    window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


def run(alpha: float, rate: float, seed: int, split: str) -> dict[str, float]:
    """Train one model and score it."""
    texts, characters = corpus()
    torch.manual_seed(seed)
    model = Model(characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, args.steps)
    text = texts["train"]
    for _ in range(args.steps):
        context, target = windows(text, torch.randint(len(text) - CONTEXT, (BATCH,)))
        head = model.head
        loss = linear_cross_entropy(
            model(context), head.weight, target, alpha=alpha, linear_bias=head.bias
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    text = texts[split]
    starts = torch.arange(0, len(text) - CONTEXT, max(1, len(text) // 20_000))
    with torch.no_grad():
        logits = model.head(model(windows(text, starts)[0]))
    target = windows(text, starts)[1]
    return {
        "bits at 1/alpha": F.cross_entropy(alpha * logits, target).item() / math.log(2),
        "bits at 1": F.cross_entropy(logits, target).item() / math.log(2),
        "accuracy": (logits.argmax(1) == target).float().mean().item(),
    }


args = arguments(__doc__.splitlines()[0], alpha=0.3, seeds=6, steps=450)
compare(
    run,
    args,
    rates=(0.003, 0.01, 0.03, 0.1),
    metrics={"bits at 1/alpha": -1, "bits at 1": -1, "accuracy": 1},
    command=f"python examples/language_model.py --alpha {args.alpha} --steps {args.steps}",
)
