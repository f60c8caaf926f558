"""Time of ``import freshper`` in a fresh interpreter, median of several: must stay under 0.3 s.

    python benchmarks/import_time.py --json import_time.json

The start of the interpreter itself is not counted. Exit status 1 when the limit is passed or torch was loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

LIMIT = 0.3
PROGRAM = """
import sys, time
start = time.perf_counter()
import freshper
print(time.perf_counter() - start, "torch" in sys.modules)
"""


def import_once() -> tuple[float, bool]:
    """Seconds, and whether torch was loaded."""
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    seconds, torch_loaded = output.split()
    return float(seconds), torch_loaded == "True"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    import_once()  # the first one may have to compile and to read from the disk
    runs = [import_once() for _ in range(arguments.repeats)]
    median = statistics.median(seconds for seconds, _ in runs)
    torch_loaded = any(loaded for _, loaded in runs)
    print(f"import freshper: median {median:.3f} s of {len(runs)}, limit {LIMIT} s; torch loaded: {torch_loaded}")
    if arguments.json:
        result = {"seconds": [seconds for seconds, _ in runs], "median": median, "torch_loaded": torch_loaded}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(median >= LIMIT or torch_loaded)


if __name__ == "__main__":
    raise SystemExit(main())
