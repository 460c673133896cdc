"""Programs that SGLang's own interpreter runs. They need it and the standard library: nothing of this package."""
