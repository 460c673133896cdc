"""Fetch the model makers' own chat templates, which the tests of token-exact sessions render.

    python scripts/fetch_chat_templates.py [--out build/chat_templates]

They come from the source distribution of llama-cpp-python on PyPI (76 MB), which carries llama.cpp's collection; nothing is
compiled. Does nothing when `--out` is there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

PACKAGE = "llama-cpp-python==0.3.36"
FOLDER = "models/templates"


def fetch(out: Path) -> None:
    """Raises: SystemExit with pip's last lines when the package cannot be had."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--no-deps",
            "--dest",
            folder,
        ]
        command += ["--no-binary", "llama-cpp-python", PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            sys.exit(f"pip could not download {PACKAGE}:\n{(done.stdout + done.stderr)[-2000:]}")
        (archive,) = Path(folder).glob("*.tar.gz")
        made = Path(folder) / "templates"
        made.mkdir()
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                content = tar.extractfile(member) if path.suffix == ".jinja" and FOLDER in str(path.parent) else None
                if content is not None:
                    (made / path.name).write_bytes(content.read())
        if not any(made.iterdir()):
            sys.exit(f"{archive.name} has no templates in {FOLDER}: another version of the package is needed")
        made.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/chat_templates"))
    out = parser.parse_args().out
    if not out.is_dir():
        print(f"fetching chat templates to {out}", flush=True)
        fetch(out)


if __name__ == "__main__":
    main()
