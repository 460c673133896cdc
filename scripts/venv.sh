# Sourced by the other scripts: `ensure_venv DIR EXTRAS` leaves DIR/bin/python with this package and EXTRAS installed.

die() {
    echo "$*" >&2
    exit 1
}

# The first interpreter that is new enough: $PYTHON if set, else python3, python3.14, ... python3.11.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed and was not found (python3 is $(python3 --version 2>&1)). Install it, or set PYTHON=/path/to/python."
}

# Installs again only when pyproject.toml, the extras or the place of the checkout changed.
ensure_venv() {
    local dir="$1" extras="$2" python stamp
    if [ ! -x "$dir/bin/python" ]; then
        python="$(find_python)"
        echo "making $dir with $("$python" --version)"
        "$python" -m venv "$dir" || die "python -m venv failed: on Debian and Ubuntu, install the python3-venv package."
    fi
    stamp="$(pwd) [$extras] $(cksum <pyproject.toml)"
    if grep -qxF "$stamp" "$dir/miles-installed" 2>/dev/null; then
        return
    fi
    echo "installing miles[$extras] and what it needs (a few minutes the first time; log: $dir/install.log)"
    if ! "$dir/bin/python" -m pip install --disable-pip-version-check -e ".[$extras]" >"$dir/install.log" 2>&1; then
        tail -n 20 "$dir/install.log" >&2
        die "pip could not install miles[$extras]; the whole log is $dir/install.log"
    fi
    echo "$stamp" >>"$dir/miles-installed"
}
