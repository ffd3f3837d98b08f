"""Run lowered rows for real on gloo, with actions that sleep; say whether they hang, and how long they take.

Each line of standard input is a list of `{"rows": [["0F0", "0SEND_F0", ...], ...], "how": "posted", "unit": 0.01}`,
which run side by side; the answer is a line with the makespan of each in units (a forward of one stage sleeps for one,
a backward for two), or `null` if it hangs. It knows nothing of pipelab. What a rank does with its row:

    posted     as PyTorch's runtime: `isend` and `irecv`, and a wait before the action that needs the value
    holding    `isend`, and `recv`, which holds the rank until the value is there
    blocking   `send` and `recv`
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from itertools import chain, combinations
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 4.0
"""After how long without an end rows count as hanging, once all ranks have met: many times as long as any takes."""
fork = multiprocessing.get_context("fork")


def parsed(word: str) -> tuple[str, int, int]:
    stage, kind, microbatch = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", word).groups()
    return kind, int(stage), int(microbatch or 0)


def value_of(word: str) -> tuple[str, int, int]:
    """Return the value that a word sends or receives: its direction, giving stage and micro-batch."""
    kind, stage, microbatch = parsed(word)
    return kind[-1], stage + ((kind == "RECV_B") - (kind == "RECV_F")), microbatch


def needs(word: str) -> list[tuple[str, int, int]]:
    """Return the values that an action, or each half of a pair, needs from other stages."""
    halves = word[1:].removesuffix(")OVERLAP_F_B").split(";") if "(" in word else [word]
    found = []
    for kind, stage, microbatch in map(parsed, halves):
        if kind in ("F", "B", "I"):
            found.append((kind if kind == "F" else "B", stage + (1 if kind != "F" else -1), microbatch))
    return found


def length(word: str) -> int:
    """Return how many units an action, or both halves of a pair, takes."""
    return sum({"F": 1, "B": 2, "I": 1, "W": 1}[kind] for kind in re.findall(r"\d([FBIW])\d", word))


def run(rank: int, job: dict, path: str, pipe) -> None:
    """Be a rank."""
    with suppress(RuntimeError):  # its peers have been ended, because the rows hang
        pipe.send(span(rank, job["rows"], job["how"], job["unit"], path, lambda: pipe.send("met")))
        dist.destroy_process_group()


def span(rank: int, rows: list[list[str]], how: str, unit: float, path: str, met) -> tuple[float, float]:
    """Run a rank's row, after all ranks have met; return when it began and ended."""
    dist.init_process_group("gloo", store=dist.FileStore(path, len(rows)), rank=rank, world_size=len(rows))
    together = {(rank,): lambda _: None}  # by ranks, their all-reduce
    for many in range(2, len(rows) + 1):
        for ranks in combinations(range(len(rows)), many):
            together[ranks] = partial(dist.all_reduce, group=dist.new_group(ranks))
    other = {
        (value_of(word), "SEND" in word): at
        for at, row in enumerate(rows)
        for word in row
        if "SEND" in word or "RECV" in word
    }
    tags = {value: tag for tag, value in enumerate(sorted({value for value, _ in other}))}
    under_way, sent = {}, []
    dist.barrier()
    met()
    begun = time.perf_counter()
    for word in rows[rank]:
        value = value_of(word) if "SEND" in word or "RECV" in word else None
        number = torch.zeros(1)
        if "SEND" in word and how == "blocking":
            dist.send(number, other[value, False], tag=tags[value])
        elif "SEND" in word:
            sent.append((dist.isend(number, other[value, False], tag=tags[value]), number))
        elif "RECV" in word and how == "posted":
            under_way[value] = dist.irecv(number, other[value, True], tag=tags[value]), number
        elif "RECV" in word:
            dist.recv(number, other[value, True], tag=tags[value])
        elif "REDUCE" in word:
            together[tuple(at for at, row in enumerate(rows) if word in row)](number)
        else:
            for work, _ in [under_way.pop(needed) for needed in needs(word) if needed in under_way]:
                work.wait()
            time.sleep(unit * length(word))
    for work, _ in sent:
        work.wait()
    ended = time.perf_counter()
    dist.barrier()
    return begun, ended


def happened(jobs: list[dict]) -> list[float | None]:
    """Run each job's rows in new processes; return how long they took."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [[fork.Pipe(duplex=False) for _ in job["rows"]] for job in jobs]
        ranks = [
            fork.Process(target=run, args=(rank, job, str(Path(folder) / str(number)), far), daemon=True)
            for number, job in enumerate(jobs)
            for rank, (_, far) in enumerate(pipes[number])
        ]
        for process in ranks:
            process.start()
        try:
            for near, _ in chain(*pipes):
                near.recv()
            deadline = time.monotonic() + SECONDS
            spans = [
                [near.recv() if near.poll(max(0.0, deadline - time.monotonic())) else None for near, _ in each]
                for each in pipes
            ]
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return [
        None if None in each else (max(end for _, end in each) - min(start for start, _ in each)) / (job["unit"] or 1)
        for job, each in zip(jobs, spans, strict=True)
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(happened(json.loads(line))), flush=True)
