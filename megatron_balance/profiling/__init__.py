"""Measurements of this machine: cost tables, and a search for steps that make the host wait for the device."""
