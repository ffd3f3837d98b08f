"""Where a rank runs, and what time it is there.

- `devices`: `devices`: a device for each rank
- `streams`: how a rank computes and hands values over, on CPU and CUDA
- `clocks`: when an action ran, on CPU and CUDA
- `green_contexts`: one GPU cut into parts that run side by side
"""
