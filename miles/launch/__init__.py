"""From a command on each node to a run: a Ray cluster started or joined, the driver in it, and everything ended after it."""
