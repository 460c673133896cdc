#!/usr/bin/env bash
# Real SGLang for a CPU, in a virtual environment of its own: SGLang pins its torch and transformers exactly, so it does not
# share the trainer's. About 3 minutes and 1.7 GB.
#
#   bash scripts/install_sglang_cpu.sh [DIR]        DIR is .venv-sglang unless given
#
# Then:  python train.py --rollout-engine sglang --sglang-python DIR/bin/python ...
# PYTHON=... picks the interpreter that makes the environment (3.11 or newer).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

SGLANG=0.5.21
TORCH=2.13.0
dir="${1:-.venv-sglang}"
adaptation=scripts/sglang_cpu

install() {
    if ! "$dir/bin/python" -m pip install --disable-pip-version-check "$@" >>"$dir/install.log" 2>&1; then
        tail -n 20 "$dir/install.log" >&2
        die "pip could not install $*; the whole log is $dir/install.log"
    fi
}

if [ ! -x "$dir/bin/python" ]; then
    python="$(find_python)"
    echo "making $dir with $("$python" --version)"
    "$python" -m venv "$dir" || die "python -m venv failed: on Debian and Ubuntu, install the python3-venv package."
fi

# The script itself is part of the stamp: an environment that another version of it made is brought up to date.
stamp="$(cat scripts/install_sglang_cpu.sh "$adaptation"/requirements.txt | cksum)"
if ! grep -qxF "$stamp" "$dir/miles-installed" 2>/dev/null; then
    echo "installing SGLang $SGLANG for a CPU (about 3 minutes; log: $dir/install.log)"
    # On a host without CUDA any build of this torch serves; where the configured index has a CPU build, it is taken.
    install "torch==$TORCH"
    install --no-deps "sglang==$SGLANG" torchvision==0.28.0 xgrammar==0.2.7 compressed-tensors==0.18.0
    install -r "$adaptation/requirements.txt"
fi
site="$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
cp "$adaptation/miles_sglang_cpu.py" "$adaptation/miles_sglang_cpu.pth" "$site/"
if ! SGLANG_USE_CPU_ENGINE=1 "$dir/bin/python" -c 'from sglang.srt.server_args import ServerArgs' >>"$dir/install.log" 2>&1; then
    tail -n 20 "$dir/install.log" >&2
    die "SGLang is installed in $dir but cannot be imported; the whole log is $dir/install.log"
fi
echo "$stamp" >"$dir/miles-installed"
echo "SGLang $SGLANG is ready: --rollout-engine sglang --sglang-python $(cd "$dir/bin" && pwd)/python"
