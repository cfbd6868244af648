"""Pipeline stages that attend together against each for itself, inside Megatron's loop on an
emulated cluster.
"""
