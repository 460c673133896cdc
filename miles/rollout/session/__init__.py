"""TITO sessions: an agent speaks messages, training gets the exact tokens."""
