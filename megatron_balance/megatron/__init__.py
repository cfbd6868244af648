"""The adapter to Megatron-LM 0.19.2, on `training`.

The only package that imports the library `megatron`, with patches/, which is installed beside it.
"""
