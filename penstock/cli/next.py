"""The command that is worth typing next: the last lines of a verb that talks to people, and nowhere inside JSON."""

import shlex
import sys


def next_line(*words: object) -> str:
    """The line for one command of ours, its words quoted for a shell."""
    return f"next:  {shlex.join(['penstock', *map(str, words)])}"


def print_next(*words: object, to_stderr: bool = False) -> None:
    """Print the line.

    Args:
        words: of a command, without `penstock`.
        to_stderr: for verbs whose standard output may be read by a program.
    """
    print(next_line(*words), file=sys.stderr if to_stderr else sys.stdout)
