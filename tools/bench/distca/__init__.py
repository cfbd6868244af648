"""Ping-pong of two nano-batches against one stream, and against te_ring and zeppelin, inside
Megatron's loop on an emulated cluster.
"""
