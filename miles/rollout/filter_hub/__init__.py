"""Dynamic sampling filters, one file each. `--dynamic-sampling-filter-path` chooses."""
