"""Go on with what other ranks saved, for two steps, and save; say how far the weights are from plain training's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed.checkpoint as dcp
from facts import say
from torch import nn
from training_run import KINDS, batch, make, make_optimizer, plain_run

import pipelab

folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
plan = {4: pipelab.OneFOneB(4, 4), 2: pipelab.Interleaved1F1B(2, 4)}[ranks]
done = {4: 0, 2: 2}[ranks]

for kind in (*KINDS, "tied", "bare"):
    model = make(kind, seed=done)
    with pipelab.Pipeline(model, plan, nn.MSELoss(), engine="torch", timeout=60) as pipe:
        optimizer, scheduler = make_optimizer(kind, model if kind == "sgd" else pipe, model)

        def saved(pipe=pipe, optimizer=optimizer, scheduler=scheduler):
            return {
                "model": pipe.state_dict(),
                "optimizer": pipe.optimizer_state_dict(optimizer),
                "scheduler": scheduler.state_dict(),
            }

        if done:
            state = saved()
            dcp.load(state, checkpoint_id=folder / f"{kind}-{2 * ranks}")
            pipe.load_optimizer_state_dict(optimizer, state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
        for step in range(done, done + 2):
            optimizer.zero_grad()
            pipe.step(*batch(step))
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
        dcp.save(saved(), checkpoint_id=folder / f"{kind}-{ranks}")
        found = pipe.state_dict()
    expected, _ = plain_run(kind, done + 2)
    say(kind=kind, difference=max(float((found[name] - expected[name]).abs().max()) for name in expected))
