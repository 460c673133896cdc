"""The real SGLang server: found, started, and understood. Nothing here imports SGLang; it runs in its own interpreter."""
