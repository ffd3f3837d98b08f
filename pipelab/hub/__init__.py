"""The hub: what other programs write and read about the same plan. Nothing below the command imports it.

- `profiles`: `load`: what PyTorch's profiler wrote of each rank, as one trace
- `flight_recorder`: `culprit`: which action holds up all ranks, from PyTorch's Flight Recorder
- `chakra`: `export`: a plan as the nodes that simulators of clusters read
- `torchtitan`: `export`: a plan as the file and the options with which torchtitan trains
- `megatron`: Megatron-Core's strings for the layers of each stage, and the best one
"""
