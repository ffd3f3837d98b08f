"""Hugging Face's GPT-2, small and with random weights: three steps of AdamW, against plain training."""

from __future__ import annotations

from typing import Any

import plain
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import pipelab

IGNORED = -100


def model(**more: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **none, "use_cache": False, **more}))


def batch(rows: int, words: int = 10) -> dict[str, torch.Tensor]:
    """Return sequences of several lengths, padded."""
    ids = torch.randint(0, 48, (rows, words))
    mask = (torch.arange(words) < torch.randint(3, words + 1, (rows, 1))).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return output.loss


def counted(labels: torch.Tensor) -> torch.Tensor:
    """Return over how many words the model's loss averages: it compares each word with the one before it."""
    return (labels[:, 1:] != IGNORED).sum()


def train(ours: GPT2LMHeadModel, schedule: Any, engine: str, mixed: torch.dtype | None = None) -> dict[str, Any]:
    """Train three steps, of a batch that is smaller at last; return how far from plain training each of them is.

    With `mixed`, under autocast and with a `GradScaler`.
    """
    alone = model()
    stages = pipelab.split(ours, schedule.ranks, example=batch(2))
    losses, gradients, norms = [0.0], 0.0, []
    with pipelab.Pipeline(stages, schedule, loss, engine=engine, reduction=counted, timeout=60) as pipe:
        optimizers = [torch.optim.AdamW(list(each), lr=1e-3) for each in (pipe.parameters(), alone.parameters())]
        schedulers = [torch.optim.lr_scheduler.LinearLR(each, total_iters=3) for each in optimizers]
        scalers = [torch.amp.GradScaler("cpu", init_scale=256, enabled=mixed is not None) for _ in optimizers]
        for number, rows in enumerate((8, 8, 5)):
            torch.manual_seed(number)
            x = batch(rows)
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.autocast("cpu", dtype=mixed, enabled=mixed is not None):
                step = pipe.step(x, x["labels"], scaler=scalers[0])
                whole = alone(**x).loss
            scalers[1].scale(whole).backward()
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.unscale_(optimizer)
            losses.append(abs(float(step.loss) - whole.item()))
            there = {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
            theirs = {name: alone.get_parameter(name).grad for name in there}
            gradients = max(gradients, plain.difference(there, theirs))
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            norms.append(float(pipe.clip_grad_norm_(0.5) / norm))
            for scaler, optimizer, scheduler in zip(scalers, optimizers, schedulers, strict=True):
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        verified = pipe.verify(x, x["labels"]).largest_difference
    return {"losses": max(losses), "gradients": gradients, "norms": norms, "verified": verified}
