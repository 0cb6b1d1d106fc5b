"""The HF Trainer, with evaluation and a checkpoint."""

from __future__ import annotations

import argparse
import tempfile

import torch
from models import CONFIGS, build
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="gpt2", choices=CONFIGS)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--seq", type=int, default=256)
args = parser.parse_args()
model = build(args.model)


class Lines(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, _index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, model.config.vocab_size, (args.seq,))
        return {"input_ids": ids, "labels": ids}


with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=args.steps,
        bf16=torch.cuda.is_available(),
        report_to=[],
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
    )
    Trainer(model, options, train_dataset=Lines(), eval_dataset=Lines()).train()
