"""Steps with dropout in several processes: losses, gradients, outputs, and where the caller's generator is then."""

from __future__ import annotations

import os

from facts import say
from random_steps import MODELS, SCHEDULES, told

for name in MODELS:
    for schedule in SCHEDULES:
        say(model=name, schedule=str(schedule), **told(name, schedule, "torch", seed=7 + int(os.environ["RANK"])))
