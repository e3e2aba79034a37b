"""Kernels of balanced dispatch on one GPU: right, then how long they take.

    python -m benchmarks.kernels.replicas --output replicas-h200.json
    python -m benchmarks.kernels.replicas --tiny      # on a CPU in Triton's interpreter: right only

Right: plans of random loads and of the workloads equal the definition on every source; weights pushed to slots and
gradients pulled from them, of ranks that are simulated in one memory, are those of the plan; products with weights in
two places are the same bits as with one stack, in 16 bits.

Times are medians from CUDA events, in one graph each as in a captured step: the plan (order of the slots excluded,
which a layer without replicas needs too) of 4 ranks x 64 experts and of 8 x 256, and the three products of an expert
block with home and slot segments against one stack with the same rows. `push` and `pull` are of one expert within the
GPU's own memory; between GPUs the link is the limit.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.balanced_cases import NAMES, all_choices
from benchmarks.kernels.grouped_gemm import Contenders, take_turns
from penstock.kernels import reference, replica_kernels, replica_plan
from penstock.kernels.grouped_gemm import (
    grouped_gemm_forward,
    grouped_gemm_input_gradient,
    grouped_gemm_weight_gradient,
)
from penstock.kernels.permute import order_rows
from penstock.kernels.replica_plan import PlanFact, ReplicaPlan, ReplicaRule
from penstock.kernels.replica_slots import SlottedWeight
from penstock.kernels.replica_transfer import clear_slots, pull_gradients, push_replicas
from penstock.kernels.symmetric import Peers
from penstock.kernels.tile_table import tile_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = {
    "V2-Lite, 4 ranks": ReplicaRule(experts=64, groups=4, slots=4, tolerance=50_000, least_rows=1024),
    "V3, 8 ranks": ReplicaRule(experts=256, groups=8, slots=4, tolerance=50_000, least_rows=1024),
}
TOKENS, TOP_K = 8192, {"V2-Lite, 4 ranks": 6, "V3, 8 ranks": 8}
D, F = 2048, 1408  # of V2-Lite


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--vectors", type=int, default=300, help="random loads of the check")
    parser.add_argument("--tiny", action="store_true", help="correctness of few small cases")
    record.add_arguments(parser)
    options = parser.parse_args()
    numbers: dict[str, Any] = {"checked": check(8 if options.tiny else options.vectors)}
    print(f"right: {numbers['checked']}", flush=True)
    if not options.tiny:
        numbers["plans"] = [
            time_plan(name, workload, options.rounds) for name in RULES for workload in ("W0", "W1", "W2")
        ]
        numbers["products"] = time_products(options.rounds)
        numbers["transfers"] = time_transfers(options.rounds)
        record.write(options, numbers)


def check(vectors: int) -> dict[str, int]:
    """Numbers of cases that were right; an AssertionError otherwise."""
    draw = random.Random(0)
    for _ in range(vectors):
        groups, per_group = draw.choice([2, 3, 4, 8]), draw.choice([1, 2, 8])
        rule = ReplicaRule(
            experts=groups * per_group,
            groups=groups,
            slots=draw.choice([1, 2, per_group]),
            tolerance=draw.choice([0, 50_000]),
            least_rows=draw.choice([0, 7]),
        )
        power = draw.choice([0, 1, 4, 16])
        counts = [[int(99 * draw.random() ** power) for _ in range(rule.experts)] for _ in range(groups)]
        counts_WE = torch.tensor(counts, dtype=torch.int32)
        _check_plan(counts_WE, rule)
        _check_transfers(counts_WE, rule)
    workloads = 0
    for name in NAMES if vectors > 8 else ():
        for label, rule in RULES.items():
            _check_plan(_counts(name, rule, TOP_K[label]), rule)
            workloads += 1
    products = check_products() if DEVICE == "cuda" else 0
    return {"random loads": vectors, "workloads": workloads, "products": products}


def _check_plan(counts_WE: Tensor, rule: ReplicaRule) -> None:
    for source in range(len(counts_WE)):
        expected = replica_plan.plan_replicas(counts_WE, rule, source)
        plan = replica_kernels.plan_replicas(counts_WE.to(DEVICE), rule, source)
        for field, got, want in zip(ReplicaPlan._fields, plan, expected, strict=True):
            assert torch.equal(got.cpu(), want), f"{field} of source {source}, {rule}"
        ids = torch.repeat_interleave(torch.arange(rule.experts), counts_WE[source].long())[:, None]
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(source))]
        want = replica_plan.assign_replicas(ids, reference.order_rows(ids, rule.experts), expected, rule)
        on_device = ids.to(DEVICE)
        got = replica_kernels.assign_replicas(on_device, order_rows(on_device, rule.experts), plan, rule)
        assert torch.equal(got.cpu(), want), f"places of source {source}, {rule}"


def _check_transfers(counts_WE: Tensor, rule: ReplicaRule, numbers: int = 24) -> None:
    """Each rank pushes, then each pulls; slots of all ranks are in one memory."""
    plan = replica_kernels.plan_replicas(counts_WE.to(DEVICE), rule, 0)
    slots_ZXN = torch.full((rule.groups, max(rule.slots, 1), numbers), torch.nan, device=DEVICE)
    addresses = torch.tensor([one.data_ptr() for one in slots_ZXN], device=DEVICE)
    weights_EN = torch.randint(-9, 9, (rule.experts, numbers), device=DEVICE).float()
    ranks = [Peers(addresses_W=addresses, rank=rank) for rank in range(rule.groups)]
    of_rank = [slice(rank * rule.per_group, (rank + 1) * rule.per_group) for rank in range(rule.groups)]
    for peers, own in zip(ranks, of_rank, strict=True):
        push_replicas(weights_EN[own].contiguous(), plan, rule, peers, 0)
    slot_experts = plan.slot_experts_ZX.tolist()
    for slots_XN, experts in zip(slots_ZXN, slot_experts, strict=True):
        for row, expert in zip(slots_XN, experts, strict=True):
            want = weights_EN[expert] if expert < rule.experts else torch.full_like(row, torch.nan)
            assert torch.equal(row.nan_to_num(99), want.nan_to_num(99)), f"slot of expert {expert}, {rule}"
    totals_EN = torch.ones_like(weights_EN)
    for peers, own in zip(ranks, of_rank, strict=True):
        pull_gradients(totals_EN[own], plan, rule, peers, 0)
    copies = [sum(one == expert for experts in slot_experts for one in experts) for expert in range(rule.experts)]
    want = 1 + weights_EN * torch.tensor(copies, device=DEVICE)[:, None]
    assert torch.equal(totals_EN, want), f"sums of replicas, {rule}"
    for slots_XN, experts, peers in zip(slots_ZXN, slot_experts, ranks, strict=True):
        clear_slots(slots_XN, plan, rule, peers)
        assert all(
            row.isnan().all() if one == rule.experts else not row.any()
            for row, one in zip(slots_XN, experts, strict=True)
        )


@dataclass(frozen=True)
class Products:
    """An expert block's products with weights as one stack, and in two places."""

    counts_e: Tensor
    x_RD: Tensor
    dy_RF: Tensor
    stack_eFD: Tensor
    slots: int

    @staticmethod
    def draw(counts: list[int], slots: int) -> "Products":
        rows, normal = sum(counts), {"device": DEVICE, "dtype": torch.bfloat16}
        return Products(
            counts_e=torch.tensor(counts, dtype=torch.int32, device=DEVICE),
            x_RD=torch.randn(rows, D, **normal),
            dy_RF=torch.randn(rows, 2 * F, **normal),
            stack_eFD=torch.randn(len(counts), 2 * F, D, **normal) * D**-0.5,
            slots=slots,
        )

    def contenders(self, product: str) -> Contenders:
        own, rows = len(self.counts_e) - self.slots, len(self.x_RD)
        weight = SlottedWeight(self.stack_eFD[:own].clone(), self.stack_eFD[own:].clone())
        tiles = tile_table(self.counts_e, rows)
        parts = tiles.in_parts(self.counts_e, rows, self.slots)
        if product == "forward":
            return {
                "stack": lambda: grouped_gemm_forward(self.x_RD, self.stack_eFD, self.counts_e, tiles=tiles),
                "two places": lambda: grouped_gemm_forward(self.x_RD, weight, self.counts_e, tiles=parts),
            }
        if product == "input gradient":
            return {
                "stack": lambda: grouped_gemm_input_gradient(self.dy_RF, self.stack_eFD, self.counts_e, tiles=tiles),
                "two places": lambda: grouped_gemm_input_gradient(self.dy_RF, weight, self.counts_e, tiles=parts),
            }
        total = torch.zeros_like(self.stack_eFD, dtype=torch.float32)
        sums = SlottedWeight(total[:own].clone(), total[own:].clone())
        operands = (self.dy_RF, self.x_RD, self.counts_e)
        return {
            "stack": lambda: grouped_gemm_weight_gradient(*operands, accumulate_into=total, tiles=tiles),
            "two places": lambda: grouped_gemm_weight_gradient(*operands, accumulate_into=sums, tiles=parts),
        }


COUNTS = {
    "no replica": [3072] * 16 + [0] * 4,
    "two replicas": [2700] * 16 + [3000, 2952, 0, 0],
    "four replicas": [2304] * 16 + [3072] * 4,
}
"""Rows of 16 own experts and 4 slots, 49,152 in all."""


def check_products() -> int:
    """Both forms give the same bits."""
    found = 0
    for counts in [*COUNTS.values(), [5] * 15 + [0, 7, 0, 130, 1]]:
        for product in ("forward", "input gradient", "weight gradient"):
            first, second = (make() for make in Products.draw(counts, 4).contenders(product).values())
            second = torch.cat(second[:2]) if isinstance(second, SlottedWeight) else second
            assert torch.equal(first, second), f"{product} of {counts}"
            found += 1
    return found


def time_products(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, counts in COUNTS.items():
        for product in ("forward", "input gradient", "weight gradient"):
            times = take_turns(Products.draw(counts, 4).contenders(product), rounds)
            row = {"rows": name, "product": product} | {f"{key}_ms": value for key, value in times.items()}
            row["over_stack"] = times["two places"] / times["stack"]
            rows.append(row)
            print(
                f"  {name:<16}{product:<18}" + "".join(f"{value:>9.3f}" for value in list(row.values())[2:]), flush=True
            )
    return rows


def _counts(workload: str, rule: ReplicaRule, top_k: int) -> Tensor:
    ids_TK = all_choices(workload, 0, TOKENS * rule.groups, rule.experts, top_k, rule.groups)
    pieces = (piece.flatten().bincount(minlength=rule.experts) for piece in ids_TK.chunk(rule.groups))
    return torch.stack(list(pieces)).int()


def time_plan(name: str, workload: str, rounds: int) -> dict[str, Any]:
    """Microseconds of the plan and of the slots' physical experts."""
    rule, top_k = RULES[name], TOP_K[name]
    counts_WE = _counts(workload, rule, top_k).to(DEVICE)
    ids_TK = all_choices(workload, 0, TOKENS * rule.groups, rule.experts, top_k, rule.groups)[:TOKENS].to(DEVICE)
    order = order_rows(ids_TK, rule.experts)
    plan = replica_kernels.plan_replicas(counts_WE, rule, 0)
    times = {
        "plan_us": _in_graph(lambda: replica_kernels.plan_replicas(counts_WE, rule, 0), rounds),
        "assign_us": _in_graph(lambda: replica_kernels.assign_replicas(ids_TK, order, plan, rule), rounds),
    }
    facts = {"replicas": int(plan.facts[PlanFact.REPLICAS]), "shape": name, "workload": workload}
    row = facts | times | {"both_us": sum(times.values())}
    print(
        f"  {name:<18}{workload:<4}" + "".join(f"{value:>9.1f}" for value in times.values()),
        row["replicas"],
        flush=True,
    )
    return row


def time_transfers(rounds: int) -> list[dict[str, Any]]:
    """One expert of V2-Lite pushed, and its gradient pulled."""
    rule = ReplicaRule(experts=4, groups=2, slots=2)
    counts_WE = torch.tensor([[40, 0, 0, 0]] * 2, dtype=torch.int32, device=DEVICE)
    plan = replica_kernels.plan_replicas(counts_WE, rule, 0)
    slots_ZXN = torch.zeros(2, 2, 3 * F * D, device=DEVICE)
    peers = Peers(addresses_W=torch.tensor([one.data_ptr() for one in slots_ZXN], device=DEVICE), rank=0)
    weight = torch.zeros(2, 3 * F * D, dtype=torch.bfloat16, device=DEVICE)
    totals = torch.zeros(2, 3 * F * D, device=DEVICE)
    times = {
        "push_us": _in_graph(lambda: push_replicas(weight, plan, rule, peers, 0), rounds),
        "pull_us": _in_graph(lambda: pull_gradients(totals, plan, rule, peers, 0), rounds),
        "clear_us": _in_graph(lambda: clear_slots(slots_ZXN[1], plan, rule, replace(peers, rank=1)), rounds),
    }
    print("  " + "  ".join(f"{key} {value:.1f}" for key, value in times.items()), flush=True)
    return [times]


def _in_graph(call: Callable[[], object], rounds: int, calls: int = 20) -> float:
    """Microseconds of a call, replayed."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = take_turns({"graph": graph.replay}, rounds)
    return times["graph"] * 1e3 / calls


if __name__ == "__main__":
    main()
