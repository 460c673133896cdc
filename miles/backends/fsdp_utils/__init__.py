"""The FSDP2 trainer: any Hugging Face causal language model, sharded by torch, no conversion step."""
