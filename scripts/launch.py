"""Start or join a Ray cluster, run a driver in it, and leave nothing behind.

    python scripts/launch.py -- --hf-checkpoint MODEL ...                       # this machine
    python scripts/launch.py --num-nodes 4 --node-rank $RANK --head $HOST -- ...    # the same on each of four nodes
    python scripts/launch.py --address HEAD:6379 -- ...                         # in a cluster that runs already
    python scripts/launch.py --address http://HEAD:8265 -- ...                  # as a job of that cluster's job server

Every option can come from the environment as MILES_SCRIPT_<OPTION>; under SLURM the number of nodes and the rank are found.
The exit code is the driver's. See docs/launch.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles.launch.main import main

if __name__ == "__main__":
    sys.exit(main(description=__doc__))
