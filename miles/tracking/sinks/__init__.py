"""Where metrics go: one file a sink."""
