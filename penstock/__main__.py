"""`python -m penstock` is the command line, and so is `penstock`, which imports this file."""

import sys

from penstock.cli.interrupts import end_at_once

end_at_once()

from penstock.cli.main import main  # noqa: E402 - Ctrl-C during this import prints nothing

if __name__ == "__main__":
    sys.exit(main())
