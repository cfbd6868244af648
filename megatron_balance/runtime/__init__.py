"""Plans on tensors: torch and torch.distributed, no Megatron and no planner."""
