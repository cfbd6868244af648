"""Costs: seconds and bytes that a placement is predicted to take."""
