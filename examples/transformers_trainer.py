"""PowerGrad Transform with the transformers Trainer: a tiny GPT-2 trained on Python docstrings.

    python examples/transformers_trainer.py
    python examples/transformers_trainer.py --through compute_loss_func

Needs ``pip install transformers accelerate``. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import builtins
import tempfile

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from powergrad import PowerGrad

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--alpha", type=float, default=0.3)
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--through", choices=["model", "compute_loss_func"], default="model")
args = parser.parse_args()

# The docstrings of the builtins, one token per character, in blocks of 64.
text = "\n".join(getattr(builtins, name).__doc__ or "" for name in dir(builtins))
tokens = torch.tensor([min(ord(c), 127) for c in text])
blocks = tokens[: len(tokens) // 64 * 64].view(-1, 64)
dataset = [{"input_ids": block, "labels": block} for block in blocks]

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
               eos_token_id=0)
)  # fmt: skip
# Makes the Trainer count only predicted tokens. From the name of GPT-2's class it cannot infer that
# the first token of each block is not predicted.
model.loss_type = "ForCausalLM"
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=args.steps,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=args.steps // 3,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)

compute_loss_func = None
if args.through == "model":  # the model computes its own loss
    model.loss_function = PowerGrad(args.alpha)(model.loss_function)
else:

    @PowerGrad(args.alpha)
    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        """The loss of the model, divided by the number of tokens in all accumulated batches."""
        return ForCausalLMLoss(outputs.logits, labels, 128, num_items_in_batch)


trainer = Trainer(model, arguments, train_dataset=dataset, compute_loss_func=compute_loss_func)
trainer.train()

# PGT fits softmax(alpha * z), so at temperature 1 the network is overconfident.
with torch.no_grad():
    logits = model.eval()(input_ids=blocks).logits[:, :-1].flatten(0, 1)
for temperature in (1, 1 / args.alpha):
    loss = F.cross_entropy(logits / temperature, blocks[:, 1:].flatten())
    print(f"training loss at temperature {temperature:.2f}: {loss:.3f}")
