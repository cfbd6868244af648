"""The GPU suite: every kernel against its twin, training with balance on and off, and what it all takes, in one command.

python -m tools.gpu.run [--json]
"""
