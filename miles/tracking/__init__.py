"""Metrics: what they are computed from, where they are written, how they are shown."""
