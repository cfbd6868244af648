"""Simulated against measured attention calls, on the emulated cluster. See docs/simulator.md."""
