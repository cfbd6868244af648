"""Host time of attention calls: what a rank's host issues for a layer, counted on real plans.

`counted` runs one rank's calls on stand-ins for CUDA streams, kernels and Triton; `plans` makes the
plans; `budget` prices what was counted beside the kernel's predicted time.
"""
