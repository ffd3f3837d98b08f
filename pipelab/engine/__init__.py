"""EXECUTED: a plan on real tensors.

- `pipeline`: `Pipeline`, the face
- `optimizer`: an optimizer's state under the model's own names
- `engine`: what a pipeline asks of an engine; one step of the ranks in this process, and its result
- `worker`: the threads in which both engines compute, and the loop in which a caller waits
- `stage`: one stage, forward and backward: shared by both engines
- `threads`: the engine with one worker thread per rank, in one process; its instructions and its all-reduce
- `torchrun`: the engine with one process per rank, on PyTorch's pipelining runtime
- `model`: the model cut into stages
- `device`: which device a rank runs on, its stream and its clock
- `verify`: gradients, a pipeline's or any other step's, compared with the plain model's
- `memory`: the bytes that stages and ranks hold, measured
- `emulation`: models that take time without using the processor
"""
