"""Every test runs offline, on one thread, and without a GPU unless it asks for one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.pop("RAY_ADDRESS", None)  # tests start their own cluster
