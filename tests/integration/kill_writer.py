"""Writers to be killed: forks one on request, so that a hundred of them cost no hundred starts of the interpreter.

Reads lines "directory seed operations" and answers with the process number of a new writer, which opens the
directory and acknowledges every operation on standard output, after it has returned.
"""

import importlib.util
import os
import sys
from pathlib import Path

from freshper.replay.disk.arrow_columns import arrow
from freshper.replay.disk.durable import DurableLog

WORLD = Path(__file__).parents[1] / "unit" / "replay" / "disk" / "durable_world.py"


spec = importlib.util.spec_from_file_location("durable_world", WORLD)
assert spec is not None
assert spec.loader is not None
world = importlib.util.module_from_spec(spec)
spec.loader.exec_module(world)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # at once, and whole


def write(directory: Path, seed: int, operations: int) -> None:
    log, recovered = DurableLog.open(directory, fsync="checkpoint")
    model = world.World.recover(seed, recovered)
    say(f"open {model.done}")
    for _ in range(operations):
        model.step(log)
        say(f"done {model.done}")
    log.close()
    say("closed")


def main() -> None:
    arrow()
    # What a killed process wrote is safe without it, and the time goes into operations instead of a busy disk.
    os.fsync = lambda _: None  # type: ignore[assignment]
    say("ready")
    for line in sys.stdin:
        directory, seed, operations = line.split()
        child = os.fork()
        if not child:
            status = 1
            try:
                write(Path(directory), int(seed), int(operations))
                status = 0
            finally:
                os._exit(status)
        say(f"writer {child}")
        os.waitpid(child, 0)
        say("ended")


if __name__ == "__main__":
    main()
