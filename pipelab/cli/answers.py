"""Commands that answer a question: which schedules are there, why is a rank idle, how quick can an order be?"""

from __future__ import annotations

from glob import glob
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Columns
from rich.text import Text

import pipelab
from pipelab.cli.options import Save, SaveTable, Sizes, Target, Times, grouped, untimed
from pipelab.cli.printing import ROWS, TIMELINE, echo, print_and_save, require_writable, save_timeline, say, wrote
from pipelab.cli.targets import settings
from pipelab.draw import text, wording
from pipelab.draw.why import sentence
from pipelab.errors import UsageError
from pipelab.hub.flight_recorder import culprit
from pipelab.hub.megatron import best_layout, read_layout, simulate_layout
from pipelab.layouts.search import full_names
from pipelab.table import Column, Table


def schedules() -> None:
    """List the schedules that come with pipelab.

    With the sizes that they accept, their sources, and formulas of the bubble.
    """
    table = Columns("name", "what it does, which sizes it accepts, its bubble, its source", box=None, pad_edge=False)
    for name, kind in pipelab.schedules.items():
        table.add_row(name, (kind.__doc__ or "").strip().splitlines()[0])
        table.add_row("", Padding(Text(f"accepts {_sizes_of(kind)}"), (0, 0, 0, 2)))
        bubbles = [f"bubble {form}{key[6:]}" for key, form in kind.closed_forms.items() if key.startswith("bubble")]
        for line in [*bubbles, kind.source]:
            table.add_row("", Padding(Text(line, style="dim"), (0, 0, 0, 2)))
    Console().print(table)
    say("P ranks, M micro-batches, v stages per rank, k slices per sequence; equal stages and free transfers")


def _sizes_of(kind: type[pipelab.Schedule]) -> str:
    letters = set("".join(kind.needs.values()))
    sizes = [] if letters & {"P", "M"} else ["any number of ranks and micro-batches"]
    return ", ".join([*sizes, *kind.needs, *([] if "v" in letters else ["any number of stages per rank"])])


@grouped
def why(
    target: Target,
    sizes: Sizes,
    times: Times,
    rank: Annotated[int | None, typer.Option(min=0, help="one rank: all of its idle times")] = None,
    at: Annotated[float | None, typer.Option(help="a time: why the rank is idle then, back to the root")] = None,
    delays: Annotated[bool, typer.Option("--delays", help="for each rank, what it costs that it is slow")] = False,
    recorder: Annotated[
        str | None,
        typer.Option(help="files of PyTorch's Flight Recorder, 'trace_rank_*': which action holds up all ranks"),
    ] = None,
    save: SaveTable = None,
) -> None:
    """Say why ranks are idle.

    By default a table of reasons; with --rank one rank's idle times, with --at one of them back to its root. With
    --recorder, of a job that hangs: which rank holds up the others, and where it is in the plan.

    For example: pipelab why 1f1b --rank 2; pipelab why 1f1b --rank 2 --at 8; pipelab why "rank*.json.gz" --delays
    """
    if at is not None and rank is None:
        raise UsageError(f"--at {at:g} needs a rank: pipelab why {target} --rank 0 --at {at:g}")
    require_writable(save, ROWS)
    if recorder is not None:
        echo(str(culprit(untimed(sizes.find(target)), sorted(glob(recorder)))))
        return
    (trace,) = times.traces([sizes.find(target)], [target])
    if delays:
        if save or at is not None:
            raise UsageError("--delays prints sentences: leave out --save and --at")
        echo("\n".join(str(pipelab.what_if(trace, each)) for each in range(trace.ranks) if rank in (None, each)))
    elif rank is None:
        echo(f"{wording.headline(trace)}\n{wording.caption(trace)}")
        print_and_save(trace.ledger.table, save)
    elif at is not None:
        echo(trace.why(rank, at))
    else:
        told = "\n".join(sentence(trace, each) for each in trace.idle if each.rank == rank)
        echo(told or f"rank {rank} is never idle")


@grouped
def optimum(
    target: Target,
    sizes: Sizes,
    times: Times,
    memory_cap: Annotated[int | None, typer.Option(min=1, help="how many activations a rank may hold")] = None,
    seconds: Annotated[float, typer.Option(help="how long the solver may take at most")] = 10,
    save: Save = None,
) -> None:
    """Find the quickest order of a schedule's actions.

    It says whether the order is proven to be the quickest.
    """
    require_writable(save, TIMELINE)
    best = pipelab.optimum(untimed(sizes.find(target)), times.cost(), memory_cap=memory_cap, seconds=seconds)
    echo(text.timeline(best.trace))
    unit = wording.unit(best.trace)
    if best.proven:
        say(f"No order of these actions on these ranks is quicker than {wording.span(best.trace)}: that is proven.")
    else:
        say(
            f"No order is proven to be the quickest yet: every one takes at least {wording.number(best.bound)} {unit}, "
            f"and this one at most {wording.percent(best.gap)} more. More --seconds may find a better one."
        )
    for path in save or []:
        wrote(save_timeline(best.trace, path))


def layout(
    model: Annotated[Path, typer.Argument(help="sizes of a transformer: TOML, or Hugging Face's config.json")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="how many devices")],
    memory: Annotated[float | None, typer.Option(help="GB (10⁹ bytes) of each; by default, the device's own")] = None,
    device: Annotated[str, typer.Option(help="a device by name, such as a100 or h100")] = "h100",
    batch: Annotated[int | None, typer.Option(min=1, help="sequences in a step; by default 4 million tokens")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="tokens in a sequence, instead of the file's")] = None,
    margin: Annotated[float, typer.Option(min=0, max=0.9, help="share of the memory left for the runtime")] = 0.06,
    top: Annotated[int, typer.Option(min=1, help="how many layouts to show")] = 10,
    sets: Annotated[list[str] | None, typer.Option("--set", help='your own values: "tp=8 pp=4"; repeatable')] = None,
    schedules: Annotated[str, typer.Option(help="the schedules to try")] = "1f1b interleaved-1f1b zb-h1 zbv v-half",
    save: SaveTable = None,
) -> None:
    """Rank the layouts of a dense model that fit.

    Then, of the quickest, where its time goes and what each rank holds. --set fixes some or all of TP, CP, EP, DP (how
    many devices share a layer, a sequence, the experts, the batch), PP (ranks of the pipeline), v (stages on a rank), M
    (micro-batches of a replica), b (sequences in one), zero (what DP shares: 0 nothing, 1 the optimizer's state, 2
    gradients too, 3 weights too), schedule, recompute (none, selective, full).

    Above bound: how much longer the step is than any order of its actions must take; at 0 %, ranks may still wait. MFU:
    the share of the peak. GB: what the fullest device holds. Sent: by each device of the first rank in a step. Terms
    are of the rank that works longest. Head: the product with the vocabulary. Parallelism: collectives that nothing
    hides. Waiting: the rest of the step. One backward: what a layer needs while its backward runs.

    For example: pipelab layout config.json --gpus 64 --sequence 8192 --set "tp=4 pp=4 recompute=full"
    """
    require_writable(save, ROWS)
    found = pipelab.layout(
        model, gpus=gpus, memory=memory, device=device, batch=batch, sequence=sequence, margin=margin, top=top,
        schedules=schedules, **full_names(settings(" ".join(sets or []).replace(",", " ").split(), such="tp=8")),
    )  # fmt: skip
    print_and_save(found.table, save)


@grouped
def megatron(
    target: Target,
    sizes: Sizes,
    time: Annotated[list[str], typer.Option(help="of a layer E, t, m or L: t=1, with its backward t=(1, 2.5); repeat")],
    decoders: Annotated[int | None, typer.Option(min=1, help="how many decoder layers, t")] = None,
    mtp: Annotated[int, typer.Option(min=0, help="how many layers for multi-token prediction, m")] = 0,
    layout: Annotated[str | None, typer.Option(help="instead: a layout to beat, with its layers")] = None,
    save: SaveTable = None,
) -> None:
    """Find the best layers of Megatron-Core's stages.

    As a string for --pipeline-model-parallel-layout.

    For example: pipelab megatron interleaved-1f1b -r 4 --decoders 18 --time E=0.2 --time t=1 --time L=0.9
    """
    require_writable(save, ROWS)
    schedule, times = untimed(sizes.find(target)), settings(time, "--time", "t=1")
    if (layout is None) == (decoders is None) or (layout and mtp):
        raise UsageError("give the layers, as --decoders 18 --mtp 1, or a layout that has them, as --layout 'Ett|ttL'")
    if layout is not None:
        decoders, mtp = ("".join(read_layout(layout)).count(letter) for letter in "tm")
    rows = []
    for each in filter(None, (layout, best_layout(schedule, decoders or 0, times, mtp=mtp))):
        trace = simulate_layout(schedule, each, times)
        rows.append(
            {"layout": each, "makespan": trace.makespan, "bubble": trace.bubble, "bound": pipelab.lower_bound(trace)}
        )
    numbers = [Column("makespan", "step time", wording.number), Column("bound", "in any order", wording.number)]
    print_and_save(Table(rows, [Column("layout"), *numbers, Column("bubble", "", wording.percent)]), save)


def frontier(
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, help="workers of the pipeline")] = 4,
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", min=1, help="slices of the batch")] = 8,
    save: Annotated[
        Path | None, typer.Option("--save", "-o", help="a file: svg for the picture; csv md html txt")
    ] = None,
) -> None:
    """Search for the smallest bubble that each memory buys.

    Building blocks beside all schedules, at forward 1, backward 2; other costs: pipelab.frontier.
    """
    require_writable([save] if save else [], ("a frontier", (".svg", ".csv", ".md", ".html", ".txt")))
    found = pipelab.frontier(ranks, microbatches)
    echo(str(found))
    if save:
        wrote(found.save(save))
