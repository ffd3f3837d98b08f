"""Collectives on tensors: the ring all-reduce, and the codecs that make its messages smaller.

- `codecs`: how a chunk of numbers becomes a message: none, fp16, bf16, int8, int8-ef
- `ring`: the mean over replicas, chunk by chunk around a ring, also as a hook of PyTorch's DistributedDataParallel
- `part`: one rank's part in it, and the way between processes
"""
