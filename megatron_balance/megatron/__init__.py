"""The adapter to Megatron-LM 0.19.2: the only package that imports `megatron` (with patches/, which is installed beside it)."""
