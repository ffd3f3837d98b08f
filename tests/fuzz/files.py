"""Broken and hostile files: whatever one holds, it is read or refused, and nothing raw of it reaches a reader.

Each function does one experiment, which its seed decides, and returns what went wrong, or `None`. An exception is a
failure too.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import math
import pickle
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pipelab
from pipelab.cli import app
from pipelab.draw import figure, graph, text
from pipelab.draw.page import page
from pipelab.errors import FormatError, PipelabError, UsageError
from pipelab.hub import profiles
from pipelab.hub.flight_recorder import culprit
from pipelab.hub.megatron import read_layout
from pipelab.layouts.transformer import Transformer
from pipelab.trace.waits import waits

SLOW = 20
"""Seconds after which a file of some kilobytes took too long: far more than any takes on a busy machine."""

KINDS = (pipelab.OneFOneB, pipelab.ZBH1, pipelab.DualPipeV, pipelab.Interleaved1F1B)

STRANGE: tuple[Any, ...] = (
    *(math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e-300, 10**400, 10**9, 2**63, -1, 0, 1.5, -0.0),
    *(None, True, "", "a", "0F0", "0F99999999999", "R", "\x1b[31m", "\ud800", "\0", "1", "0B0 " * 9),
    *([], [[]], [None], {}, {"a": 1}, [1, 2, 3, 4, 5, 6], [[[[]]]]),
)
NAMES = (
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x9b31m",
    "a\r\nb\tc",
    "\u202eright to left",
    "\ud800 half of a pair",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- ]]> & \" ' {{data}}",
    "$\\frac{1$ %s {0} [red]markup[/red]",
    "\x00\x08\x7f",
    "x" * 3000,
)
TAGS = ("<script>alert", "<img src=x", "]]> &")


def good(chance: random.Random, name: str = "a trace", unit: str = "") -> dict[str, Any]:
    """Return a right trace as plain data."""
    kind = chance.choice(KINDS)
    plan = pipelab.Plan(kind(2, chance.choice((2, 4, 6))).plan().rows, name=name)
    cost = pipelab.Cost(latency=chance.choice((0, 0.5)), unit=unit, pair=chance.choice((None, 2)))
    return pipelab.simulate(plan, cost).to_dict()


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return every place in plain data, as a list or dict and a key of it."""
    found: list[tuple[Any, Any]] = []
    keys = data.keys() if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        found.append((data, key))
        found.extend(places(data[key]))
    return found


def flipped(chance: random.Random, written: bytes) -> bytes:
    """Return bytes of which some bits have changed."""
    changed = bytearray(written)
    for _ in range(chance.choice((1, 3, 30))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def mutated(chance: random.Random, data: dict[str, Any]) -> bytes:
    """Return the JSON of a trace with some changes, of its values or of its bytes."""
    if "starts" in data and chance.random() < 0.2:
        scale = chance.choice((1e-320, 1e-29, 1e-9, 1e9, 1e28, 1e307))
        for key in ("starts", "ends"):
            data[key] = [[time * scale for time in times] for times in data[key]]
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        # A key of the outermost dict as often as one of the many times.
        where, key = chance.choice(
            (places(data) or [(data, 0)]) if chance.random() < 0.8 else [(data, key) for key in [*data] or [0]]
        )
        how = chance.randrange(6)
        if how == 0 and isinstance(where, dict):
            where.pop(key, None)
        elif how == 1 and isinstance(where, list):
            where.insert(key, where[key])
        elif how == 2 and isinstance(where, list):
            other = chance.randrange(len(where))
            where[key], where[other] = where[other], where[key]
        elif how == 3 and isinstance(where[key], int | float):
            where[key] = float(min(where[key], 1e9)) * chance.choice((-1, 1e-12, 1e12, 1e29, 1e-320, 0))
        else:
            where[key] = copy.deepcopy(chance.choice(STRANGE))
    written = json.dumps(data).encode()
    how = chance.randrange(16)
    if how == 0:
        written = written[: chance.randrange(len(written))]
    elif how == 1:
        written = flipped(chance, written)
    elif how == 2:
        deep = chance.choice((10, 100_000))
        at = written.find(b": ", chance.randrange(len(written))) + 2
        written = written[:at] + b"[" * deep + b"]" * chance.choice((deep, 0)) + written[at:]
    return written


def shown(trace: pipelab.Trace, chance: random.Random) -> dict[str, str]:
    """Show a trace in text, as a page, and now and then as a figure."""
    assert trace.critical_path or not trace.events
    waits(trace)
    other = pipelab.compare(trace, trace)
    drawn = {
        "repr": repr(trace),
        "text": text.timeline(trace, colour=False),
        "narrow text": text.timeline(trace, 40, colour=True),
        "comparison": text.comparison(other, colour=False),
        "page": page(trace),
    }
    if chance.random() < 0.05:
        drawn["figure"] = figure.svg(trace)
    return drawn


def fuzz_trace_file(seed: int) -> str | None:
    """Break a trace's file: it is refused with a FormatError, or it loads and is drawn."""
    chance = random.Random(seed)
    written = mutated(chance, good(chance, unit=chance.choice(("", "ms"))))
    with tempfile.TemporaryDirectory() as folder, in_time(f"{len(written)} bytes"):
        path = Path(folder) / "trace.json"
        path.write_bytes(written)
        try:
            trace = pipelab.Trace.load(path)
        except FormatError:
            return None
        shown(trace, chance)
        if pipelab.Trace.load(trace.save(path)) != trace:
            return f"seed {seed}: another trace after saving and loading"
    return None


@contextlib.contextmanager
def in_time(what: str) -> Iterator[None]:
    """Fail if this takes too long."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < SLOW, f"{took:.0f} s for {what}"


PROFILES = Path(__file__).parent.parent / "hub" / "profiles"


def fuzz_profile(seed: int) -> str | None:
    """Break a rank's profile: all are refused with a FormatError, or they load and are drawn."""
    chance = random.Random(seed)
    name = chance.choice(("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev"))
    files = [gzip.decompress(path.read_bytes()) for path in sorted((PROFILES / name).iterdir())]
    which = chance.randrange(2)
    data = json.loads(files[which])
    events = data["traceEvents"]
    for _ in range(chance.choice((0, 1, 3, 30))):
        event = chance.choice(events)
        how = chance.randrange(5)
        if how == 0:
            events.remove(event)
        elif how == 1:
            events.insert(0, dict(event))
        elif how == 2 and isinstance(event.get("ts"), float):
            event["ts"] += chance.choice((-1e9, -300, 300, 1e4, 1e12, 1e300))
        elif how == 3 and isinstance(event.get("name"), str):
            event["name"] = chance.choice(("PP:0F0", "PP:9F9", "PP:(0F3;3B1)OVERLAP_F_B", "PP:9999999F0", "Forward 7"))
        else:
            event[chance.choice(("name", "cat", "ph", "ts", "dur", "args"))] = copy.deepcopy(chance.choice(STRANGE))
        if not events:
            break
    files[which] = mutated(chance, data) if chance.random() < 0.5 else json.dumps(data).encode()
    if chance.random() < 0.2:
        files[which] = gzip.compress(files[which])[: chance.choice((None, 1000))]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"rank{rank}.json" for rank in range(2)]
        for path, held in zip(paths, files, strict=True):
            path.write_bytes(held)
        try:
            trace = profiles.load(paths)
        except FormatError:
            return None
        shown(trace, chance)
        trace.ledger  # noqa: B018 - it is computed when read
        pipelab.what_if(trace, 0)
    return None


CELLS = ("0F0", "1F0", "0B0", "F0", "B1", "R", "0R", "2REDUCE_GRAD", "(0F3;3B1)OVERLAP_F_B", "0I0", "0W0", "", '""')
STRANGE_CELLS = (
    *(
        "0F99999999999",
        f"{'9' * 5000}F0",
        f"F{'9' * 4299}",
        "3F100000",
        "500F0",
        "-1F0",
        "0F0 0B0",
        "0f0",
        "x" * 200_000,
    ),
    *('"', '"0F0', ";", "0F0;0B0", "\x1b[31m", "\x00", "\ufeff", "(0F0;0F1)OVERLAP_F_B", "1_0F0", "٣F٣", "\u2028"),
)


def fuzz_csv(seed: int) -> str | None:
    """Break a plan's file: it is refused with a FormatError, or it is read, checked, and perhaps simulated."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        rows = [list(map(str, row)) for row in chance.choice(KINDS)(2, 4).plan().rows]
    else:
        lengths = (0, 1, 5, 40)
        rows = [chance.choices(CELLS, k=chance.choice(lengths)) for _ in range(chance.choice((0, 1, 2, 4, 3000)))]
    for row in rows[:5]:
        if row and chance.random() < 0.3:
            row[chance.randrange(len(row))] = chance.choice(STRANGE_CELLS)
        if row and chance.random() < 0.1:
            del row[chance.randrange(len(row))]
        chance.shuffle(row) if chance.random() < 0.1 else None
    empty = chance.choice(("", '""', '""'))
    written = chance.choice(("\n", "\r\n", "\r")).join(",".join(row) or empty for row in rows).encode()
    if written and chance.random() < 0.2:
        written = flipped(chance, written)
    # A UserWarning is of the losses' order.
    refusals = contextlib.suppress(FormatError, UserWarning)
    with tempfile.TemporaryDirectory() as folder, in_time(f"{len(written)} bytes"), refusals:
        path = Path(folder) / "plan.csv"
        path.write_bytes(written)
        plan = pipelab.Plan.from_csv(path)
        str(plan)
        if not pipelab.check(plan):
            shown(pipelab.simulate(plan), chance)
            if pipelab.Plan.from_csv(plan.to_csv(path)) != plan:
                return f"seed {seed}: another plan after writing and reading"
    return None


def command(*arguments: str) -> str:
    """Run the command in this process; return all that it printed."""
    out = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["pipelab", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        contextlib.suppress(SystemExit),
    ):
        app.main()
    return out.getvalue()


def fuzz_injection(seed: int) -> str | None:
    """Hide escape codes and scripts in every text of a trace: none comes out raw, in text, pages, figures, messages."""
    chance = random.Random(seed)
    data = good(chance)
    for key in ("name", "unit", "note"):
        if chance.random() < 0.7:
            data[key] = "".join(chance.sample(NAMES, chance.choice((1, 1, 2))))
    data["lanes"] = chance.choices(NAMES, k=2)
    faulty = chance.random() < 0.3
    if faulty:
        key = chance.choice(("rows", "source", "starts", "stages", "transfers"))
        data[key] = chance.choice((NAMES[seed % len(NAMES)], [NAMES[seed % len(NAMES)]] * 2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        seen: dict[str, str] = {}
        for name in ("check", "simulate", "compare", "draw"):
            save = ("-o", f"{folder}/out.{chance.choice(('html', 'txt', 'csv', 'svg'))}") if name == "draw" else ()
            seen[name] = command(name, str(path), *save)
        seen |= {file.name: file.read_text("utf-8") for file in Path(folder).glob("out.*") if file.suffix != ".csv"}
        if not faulty:
            trace = pipelab.Trace.load(path)
            seen |= {name: drawn for name, drawn in shown(trace, chance).items() if name != "narrow text"}
            plan = pipelab.Plan(trace.plan.rows[:1], name=trace.name)
            try:
                pipelab.simulate(plan)
            except PipelabError as error:
                seen["faults"] = str(error)
            seen["graph"] = graph.dot(trace.plan)
    for where, out in seen.items():
        is_markup = where in ("page", "figure") or where.endswith(("html", "svg"))
        layout = "\n\t" if is_markup or where == "graph" else "\n"
        raw = [each for each in TAGS if is_markup and each in out]
        raw += [each for each in set(out) - set(layout) if not each.isprintable()]
        if raw:
            return f"seed {seed}: {where} holds {raw[0]!r} raw"
    return None


SIZES = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 100, "sequence": 32}
CONFIG = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9, "n_positions": 8}
CONFIG |= {"model_type": "deepseek_v3", "intermediate_size": 64, "layer_types": ["full_attention"] * 4}
CONFIG |= {"kv_lora_rank": 8, "v_head_dim": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
OPCODES = b"\x80\x02\x95(.N\x88\x89JKM\x8a\x8bGX\x8c\x8d]ae}suqr\x94hjct0p12l)\x85\x86\x87\x93R\x8eB\x96"
MOST_PEAK = 100 << 20
"""Bytes that a refusal, or what is read from some kilobytes, may take."""


def deep(chance: random.Random) -> str:
    """Return a text of JSON or TOML that is too deep, too long, or no data."""
    much = chance.choice((9, 1000, 4000, 100_000))
    return chance.choice(
        (
            *("[" * much, '{"x":' * much, "x = " + "[" * much, "x = " + "{x = " * much, ".".join("x" * much) + " = 1"),
            *("[]", "3", "null", '"x"', "", "\x00", "x = " + "9" * much, '{"x": ' + "9" * much + "}", "[x]\n" * much),
        )
    )


def altered(chance: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    """Return data of which some values are strange."""
    data = copy.deepcopy(data)
    for _ in range(chance.choice((1, 1, 3))):
        where, key = chance.choice(places(data))
        where[key] = copy.deepcopy(chance.choice((*STRANGE, 10**9, 10**4000, "x" * 999, [[]] * 999)))
    return data


def hostile_sizes(chance: random.Random, folder: Path) -> object:
    """Read a model's sizes."""
    toml = chance.random() < 0.5
    path = folder / ("model.toml" if toml else "config.json")
    data = altered(chance, SIZES if toml else CONFIG)
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in data.items())
    written = deep(chance) if chance.random() < 0.4 else lines if toml else json.dumps(data)
    path.write_text(written, encoding="utf-8", errors="replace")
    model = Transformer.load(path, chance.choice((None, None, 64)))
    return model.parameters, model.flops(8)


def hostile_recorder(chance: random.Random, folder: Path) -> object:
    """Read a file of the Flight Recorder."""
    entry = {"record_id": 0, "p2p_seq_id": 1, "profiling_name": "nccl:send 0->1", "state": "completed"}
    entries = [entry | {"p2p_seq_id": 1 + number, "process_group": ("0", "pp")} for number in range(4)]
    data = {"entries": entries, "pg_config": {"0": {"desc": "pp", "ranks": "[0, 1]"}}}
    if chance.random() < 0.7:
        data = altered(chance, data)
    if chance.random() < 0.2:
        shared: list[Any] = []
        for _ in range(60):
            shared = [shared, shared]
        where, key = chance.choice(places(data))
        where[key] = shared
        written = pickle.dumps(data)
    else:
        written = pickle.dumps(data, chance.choice((2, 4))) if chance.random() < 0.8 else json.dumps(data).encode()
    how = chance.randrange(5)
    if how == 0:
        written = flipped(chance, written)
    elif how == 1:
        at = chance.randrange(2, len(written))
        number = chance.choice((b"", b"\x00", b"\xff\xff\xff\x7f", b"\xff" * 7 + b"\x7f"))
        word = chance.choice(OPCODES).to_bytes() + number
        written = written[:at] + word * chance.choice((1, 1, 1000)) + written[at:]
    elif how == 2:
        words = (
            chance.choice(OPCODES).to_bytes() + chance.randbytes(chance.choice((0, 0, 1, 4, 8))) for _ in range(99)
        )
        written = b"\x80\x02" + b"".join(words)
    elif how == 3 and chance.random() < 0.5:
        written = deep(chance).encode()
    path = folder / "trace_rank_0"
    path.write_bytes(written)
    return culprit(pipelab.OneFOneB(2, 2), [path])


def hostile_layout(chance: random.Random, folder: Path) -> object:
    """Read a layout of layers."""
    del folder
    words = (*"EtmL|()*,9012", ")*", "t*", "(t", "((((t", "99999", "9" * 5000, "[[", "]]", "decoder", "\u0663")
    return read_layout("E" * chance.randrange(2) + "".join(chance.choices(words, k=chance.choice((3, 9, 99, 9999)))))


def fuzz_hostile(seed: int) -> str | None:
    """Ask for memory and time without end: it is read or refused within bounds, and nothing raw comes out."""
    chance = random.Random(seed)
    read = chance.choice((hostile_sizes, hostile_recorder, hostile_layout))
    with tempfile.TemporaryDirectory() as folder, in_time(read.__name__):
        tracemalloc.start()
        try:
            read(chance, Path(folder))
        except (FormatError, UsageError):
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    return f"seed {seed}: {read.__name__} took {peak >> 20} MB" if peak > MOST_PEAK else None


fuzz_hostile.seeds = 3  # type: ignore[attr-defined]
