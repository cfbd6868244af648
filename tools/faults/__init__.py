"""Suites that look for faults: each tries a number of cases, and goes on where it was ended."""
