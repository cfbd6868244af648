"""The GPU suite: every kernel against its twin, and training with balance on and off.

python -m tools.gpu.run [--json]
"""
