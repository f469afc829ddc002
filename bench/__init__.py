"""Measurements: identity, distribution, speed. May import anything."""
