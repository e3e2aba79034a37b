"""Which slots a captured graph uses, and what may stand before and behind its replays."""

import pytest
import torch

from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers, TransferDirection

OUT, BACK = TransferDirection.OUT, TransferDirection.BACK


def buffers(slots: int = 2) -> SymmetricBuffers:
    sizes = BufferSizes(tokens=4, top_k=2, row_bytes=16, ranks=1, slots=slots)
    memory = torch.zeros(sizes.total_bytes, dtype=torch.uint8)
    return SymmetricBuffers(sizes, memory, [memory.data_ptr()], 0)


def take_pass(one: SymmetricBuffers, layers: int = 3) -> list[tuple[TransferDirection, int]]:
    """Forward and backward through some layers: out and back, for each."""
    return [(lane, one.take(lane)) for _ in range(2 * layers) for lane in (OUT, BACK)]


def test_what_is_taken_while_a_graph_is_captured_is_forgotten() -> None:
    recorded, plain = buffers(), buffers()
    with recorded.recording() as transfers:
        taken = take_pass(recorded)
    assert transfers == taken
    assert take_pass(recorded) == take_pass(plain)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_pass_may_be_replayed_between_any_others(before: int) -> None:
    one = buffers()
    for _ in range(before):
        one.take(OUT), one.take(BACK)
    with one.recording() as transfers:
        take_pass(one)
    for eager_layers in (0, 1, 2, 3):  # such as an evaluation, or a step that is made again
        one.replayed(transfers)
        one.replayed(transfers)
        take_pass(one, eager_layers)


def test_a_graph_that_ends_with_the_slot_that_it_begins_with_cannot_follow_itself() -> None:
    one = buffers()
    with one.recording() as transfers:
        for lane in (OUT, BACK, OUT, BACK, OUT):
            one.take(lane)
    one.replayed(transfers)
    with pytest.raises(AssertionError, match="a graph begins with slot 0 of OUT, as what came before ended"):
        one.replayed(transfers)


def test_an_eager_transfer_knows_what_a_replay_ended_with() -> None:
    one = buffers(slots=1)
    with one.recording() as transfers:
        one.take(OUT), one.take(BACK)
    one.replayed(transfers)
    with pytest.raises(AssertionError, match="two transfers in a row in slot 0 of BACK"):
        one.take(BACK)


def test_a_capture_that_fails_leaves_the_turns_as_they_were() -> None:
    failed, plain = buffers(), buffers()

    def capture() -> None:
        with failed.recording():
            failed.take(OUT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture()
    assert take_pass(failed) == take_pass(plain)


def test_a_graph_without_transfers_changes_nothing() -> None:
    one = buffers()
    one.take(OUT)
    one.replayed(())
    assert one.take(OUT) == 1
