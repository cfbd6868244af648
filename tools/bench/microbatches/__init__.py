"""Microbatches of equal length against microbatches of equal work, through Megatron's pipelines."""
