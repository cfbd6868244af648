"""Costs: seconds and bytes that a placement is predicted to take.

`analytic` computes them, `measured` reads a profile.
"""
