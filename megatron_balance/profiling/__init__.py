"""Measurements of this machine: cost tables, and a search for steps that the host waits for."""
