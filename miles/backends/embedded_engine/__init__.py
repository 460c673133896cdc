"""A small continuous-batching inference server for Hugging Face causal LMs that speaks SGLang's HTTP API."""
