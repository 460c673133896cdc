"""Token in, token out: which message is the same, which tokens stand between two turns, what a template would have said."""
