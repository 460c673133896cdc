"""Hooks of branching sessions, by the import paths that the flags name."""
