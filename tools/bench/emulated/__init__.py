"""The ablation of Zeppelin's Fig. 11, measured inside Megatron's own pretrain loop on an emulated
cluster. See docs/operating-point.md.
"""
