"""Training loops as people write them, in several processes, against plain training."""

from __future__ import annotations

import warnings

import recipes
from facts import say

import pipelab

warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # where a scaler skips the first step
schedule = pipelab.OneFOneB(2, recipes.MICROBATCHES)
for way in recipes.IN_PROCESSES:
    say(way=way, **recipes.trained(way, schedule, "torch"))
say(masks=[recipes.checkpoints_keep_masks(reentrant, schedule, "torch") for reentrant in (False, True)])
