"""`python -m penstock` is the command line, and so is `penstock`, which imports this file."""

import os
import sys

from penstock.base.interrupts import end_at_once

end_at_once()

from penstock.base.errors import LOST  # noqa: E402
from penstock.cli.main import main as run_command  # noqa: E402 - Ctrl-C during this import prints nothing


def main() -> int:
    """Run the command line of this process."""
    code = run_command()
    if code == LOST:  # threads that wait for the lost rank cannot be joined
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
