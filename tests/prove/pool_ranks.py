"""The pool of all distributed tests as the ranks of `penstock prove`."""

from penstock.base.errors import PenstockError
from penstock.prove.ranks import LONGEST_SECONDS, Assignment, Played, PlayError, play
from tests.distributed.pool import Pool, WorkerError


def _played(part: Assignment) -> Played | str:
    """What this rank gave, or the line of its refusal."""
    try:
        return play(part)
    except PenstockError as error:
        return str(error)


class PoolRanks:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def play(self, ranks: int, part: Assignment) -> list[Played]:
        try:
            results = self._pool.run(ranks, _played, part, timeout=LONGEST_SECONDS)
        except WorkerError as error:
            raise PlayError(str(error)) from error
        lines = [one for one in results if isinstance(one, str)]
        if lines:
            raise PlayError(lines[0], is_line=len(lines) == ranks)
        return results

    def close(self) -> None:
        """The pool lives on."""
