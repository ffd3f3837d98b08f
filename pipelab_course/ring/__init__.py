"""The ring all-reduce on tensors, and the codecs that make its messages smaller.

- `ring`: the mean over replicas, chunk by chunk around a ring, also as a hook of PyTorch's DistributedDataParallel
- `part`: one rank's part in it, and the way between processes
- `codecs`: how a chunk of numbers becomes a message: none, fp16, bf16, int8, int8-ef
- `drawing`: who sends which chunk to whom as a table, and what every rank then holds as a figure
"""
