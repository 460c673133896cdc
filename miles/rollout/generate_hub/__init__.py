"""Ways to generate one sample, one file each. `--custom-generate-function-path` chooses."""
