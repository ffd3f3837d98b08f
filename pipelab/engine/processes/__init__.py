"""The torch engine: one process per rank, under torchrun, on PyTorch's own pipelining runtime.

    every process    Pipeline(model, schedule, loss_fn, engine="torch")
                       │ world      who is there, and is everybody running the same plan?
                       │ lowering   the plan as an order for PyTorch's runtime
    step(x, y)         │ agreement  does everybody mean the same step?
                       │ forms      what will travel between the stages
                       │ stages     PyTorch's runtime runs the order: it sends, receives, and calls the stages
                       │ gathering  clocks aligned, times and losses to everybody
                       ▼
    at all times         watch      a process that fails or is lost is told to all others, by name

Nothing here communicates by itself: sends and receives are PyTorch's pipelining runtime's, everything else is a
collective operation of `torch.distributed`, or its store.
"""
