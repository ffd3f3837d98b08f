"""The devices of ranks, their streams and clocks.

- `devices`: a device for each rank
- `streams`: how a rank computes, sends and receives values, on CPU and CUDA
- `clocks`: when an action ran, on CPU and CUDA
"""
