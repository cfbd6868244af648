"""The ablation inside Megatron's own pretrain loop on an emulated cluster."""
