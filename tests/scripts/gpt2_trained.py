"""GPT-2 in two processes: three steps of AdamW, against plain training."""

from __future__ import annotations

import gpt2
from facts import say

import pipelab

say(**gpt2.train(gpt2.model(), pipelab.OneFOneB(2, 4), "torch"))
