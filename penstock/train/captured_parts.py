"""Passes whose layers replay their static parts (`graphs.capture` partial); between them the host may read row counts.

    first step     eager: kernels are compiled
    second step    each part of each layer is captured when the first micro-batch comes to it, and replayed
    later          replayed

A part is attention with the norms on both sides of it, the router, and the order of our own slots, forward or backward
(penstock/models/block.py, penstock/parallel/graphs.py). What lies between stays eager: dispatch with its wait for the
device, the experts, combine, the networks that every token passes. A pass that can be captured whole launches still
less (penstock/train/captured.py).

Parts know nothing of rows from other ranks, so a step that is made again with more room replays them too. They have
no collectives: a rank that replays and one that does not get along. Evaluation, and the search for a value that is not
finite, read micro-batches that carry no parts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from penstock.base.spans import MICRO_BATCH
from penstock.models.rank_model import RankModel
from penstock.parallel.graphs import Capture, PartialGraphs, one_pool
from penstock.parallel.spans import EnterPhase, span, untimed
from penstock.train.captured import first_obstacle, no_memory
from penstock.train.global_batch import GlobalBatch, MicroBatch
from penstock.train.loss import LossRule
from penstock.train.passes import differentiate, forward_backward


class CapturedParts:
    """`forward_backward` with parts that are replayed; called the same way.

    Args:
        is_asked_for: a part that finds no memory is an error; else passes go on eagerly and a notice says so.
        begin_pool: gives what captures parts into a pool of their own.

    Attributes:
        pool_bytes: device memory that the parts hold; 0 while there are none.
    """

    def __init__(self, *, is_asked_for: bool, begin_pool: Callable[[], Capture] = one_pool) -> None:
        self.pool_bytes = 0
        self._is_asked_for = is_asked_for
        self._begin_pool = begin_pool
        self._is_warm = False
        self._is_given_up = False
        self._parts: PartialGraphs | None = None
        self._notices: list[str] = []

    def __call__(self, model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase = untimed) -> Tensor:
        """See `forward_backward`.

        Raises:
            DeviceError: there is no memory for a part, on any rank, and it was asked for.
        """
        if not self._is_warm or self._is_given_up:
            self._is_warm = True
            return forward_backward(model, batch, rule, enter)
        sums = torch.zeros(1 + rule.depths, device=model.device)
        for number, micro_batch in enumerate(batch.micro_batches):
            with span(MICRO_BATCH, number):
                sums += self._differentiate(model, micro_batch, batch.counted, rule, enter)
        return sums

    def take_notices(self) -> tuple[str, ...]:
        """What a user should know and has not been told yet."""
        notices, self._notices = tuple(self._notices), []
        return notices

    def release(self) -> None:
        """Give the parts up, if there are any; the next step captures others."""
        if self._parts is not None:
            self._parts.release()
        self._parts, self.pool_bytes = None, 0

    def _differentiate(
        self, model: RankModel, micro_batch: MicroBatch, counted: Tensor, rule: LossRule, enter: EnterPhase
    ) -> Tensor:
        if self._is_given_up:
            return differentiate(model, micro_batch, counted, rule, enter)
        is_new = self._parts is None
        if self._parts is None:
            self._parts = PartialGraphs(self._begin_pool())
        reading = replace(micro_batch.reading, parts=self._parts)
        losses = differentiate(model, replace(micro_batch, reading=reading), counted, rule, enter)
        if is_new:
            self._judge(self._parts, model)
        return losses

    def _judge(self, parts: PartialGraphs, model: RankModel) -> None:
        """Keep the parts on all ranks, or on none. The pass that captured them is right in any case."""
        obstacle = first_obstacle(parts.obstacle, model.axes.world)
        if not obstacle:
            self.pool_bytes = parts.pool_bytes
            self._notices.append(
                f"graphs: {parts.count} parts captured in {parts.seconds:.1f} s; they keep "
                f"{self.pool_bytes / 1e9:.2f} GB"
            )
            return
        self.release()
        if self._is_asked_for:
            raise no_memory("graphs.capture=partial finds no memory for a part", obstacle)
        self._is_given_up = True
        self._notices.append(f"graphs: layers stay eager, there is no memory for a part ({obstacle})")
