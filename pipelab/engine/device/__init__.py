"""The devices of ranks, their streams and clocks.

- `devices`: a device for each rank; one GPU cut into partitions that run side by side
- `streams`: how a rank computes, sends and receives values, on CPU and CUDA
- `clocks`: when an action ran, on CPU and CUDA
"""
