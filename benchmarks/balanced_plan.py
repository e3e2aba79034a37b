"""Balanced dispatch on paper, on any CPU: plans of random loads, steps by recorded loads, and quantile balancing.

python -m benchmarks.balanced_plan --output benchmarks/results/balanced-plan.json

vectors     10,000 random load vectors: every rank makes the plan by itself from the gathered loads. Plans must be
            equal on all ranks, name each row once, and keep their bound if there are slots enough; if there are too
            few, the number that the plan names must do
steps       DeepSeek-V2-Lite, 8,192 tokens of a rank, projected for EP 4 to 64 by the loads of a recorded router (W9
            of benchmarks/balanced_cases.py: a small model of 64 experts, its 6 choices after 60 steps) and by
            log-normal loads (W8, the fullest expert with twice the mean): without and with `dispatch.balance`, and
            with forced balance, whose share of speed each reaches
quantiles   largest load of an expert over the mean, step by step, of a router whose experts have log-normal
            popularity, with the bias moved by a fixed step and by quantiles
"""

import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any, cast

import torch

from benchmarks import record
from benchmarks.balanced_cases import all_choices
from penstock.config.dispatcher import MOST_PEERS
from penstock.config.load import load_run
from penstock.kernels.reference import RouterRule
from penstock.kernels.replica_plan import PlanFact, ReplicaRule, place_replicas, plan_replicas
from penstock.moe.balance import SIDE, margin_counts, quantile_shift
from penstock.plan.assumptions import Assumptions
from penstock.plan.balance import balance_cases, balance_json
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.loads import RecordedLoads

VECTORS = 10_000
KINDS = ("even", "Dirichlet 1", "Dirichlet 0.1", "Zipf", "hot group", "empty groups", "one expert")
IN_A_NODE = ("dispatch.method=symmetric", "dispatch.sync_free=2", "graphs.capture=full")
BY_COLLECTIVES = ("dispatch.method=all-to-all", "graphs.capture=partial")  # more ranks than can map memory
LITE = ("training.micro_batch=2", "training.sequence_length=4096", "training.precision=bf16")
ON = (("H200", 4), ("H200", 8), ("GB200", 4), ("GB200", 8), ("GB200", 32), ("GB200", 64))
EXPERTS, TOP_K, TOKENS = 64, 6, 8192


def drawn(seed: int) -> tuple[str, ReplicaRule, list[list[int]]]:
    """Kind and rule of a vector, and the slots of each rank on each expert."""
    draw = random.Random(seed)
    groups, per_group, kind = draw.choice([2, 4, 8]), draw.choice([1, 2, 4, 8, 16]), draw.choice(KINDS)
    experts = groups * per_group
    share = [1.0] * experts
    if kind.startswith("Dirichlet"):
        share = [draw.gammavariate(float(kind.split()[1]), 1.0) + 1e-9 for _ in share]
    elif kind == "Zipf":
        share = [1 / rank for rank in range(1, experts + 1)]
        draw.shuffle(share)
    elif kind == "hot group":
        share = [draw.uniform(1.5, 6.0) if expert < per_group else 1.0 for expert in range(experts)]
    elif kind == "empty groups":
        empty = draw.randint(1, groups - 1)
        share = [0.0 if expert < empty * per_group else 1.0 for expert in range(experts)]
    elif kind == "one expert":
        share = [float(expert == draw.randrange(experts)) for expert in range(experts)]
        share[0] += not any(share)
    ranks = groups * draw.choice([1, 1, 2])
    counts = []
    for _ in range(ranks):
        slots = Counter(draw.choices(range(experts), share, k=draw.choice([0, 64, 512, 512, 512])))
        scale = draw.choice([1, 16])
        counts.append([slots[expert] * scale for expert in range(experts)])
    rule = ReplicaRule(
        experts=experts,
        groups=groups,
        slots=draw.choice([1, 2, 4, per_group]),
        tolerance=draw.choice([0, 20_000, 50_000]),
        least_rows=draw.choice([0, 64, 1024]),
    )
    return kind, rule, counts


def check(rule: ReplicaRule, counts: list[list[int]]) -> list[int]:
    """The facts of a plan that all ranks agree on; an AssertionError if it is wrong."""
    counts_WE = torch.tensor(counts, dtype=torch.int32)
    plans = [plan_replicas(counts_WE, rule, source) for source in range(len(counts))]
    first = plans[0]
    for plan in plans[1:]:
        for name in ("slot_experts_ZX", "slot_rows_ZX", "targets_EZ", "facts"):
            assert torch.equal(plan._asdict()[name], first._asdict()[name]), f"ranks differ in {name}"
    sent_EZ = torch.zeros(rule.experts, rule.groups, dtype=torch.int64)
    for source, plan in enumerate(plans):
        starts_E = counts_WE[source].cumsum(0) - counts_WE[source]
        rows_EZ = plan.ends_EZ.diff(dim=1, prepend=starts_E[:, None].int())
        assert bool((rows_EZ >= 0).all()) and torch.equal(rows_EZ.sum(1), counts_WE[source].long()), "rows are lost"
        sent_EZ += rows_EZ
    assert bool((sent_EZ[first.targets_EZ < 0] == 0).all()), "rows go to a group without the expert"
    facts: list[int] = first.facts.tolist()
    fullest, bound = facts[PlanFact.FULLEST], facts[PlanFact.BOUND]
    assert int(sent_EZ.sum(0).max()) == fullest, "the fullest group is another one"
    assert int((first.slot_experts_ZX < rule.experts).sum(1).max()) == facts[PlanFact.MOST_SLOTS] <= rule.slots
    assert fullest <= bound or facts[PlanFact.SLOTS_NEEDED] > rule.slots, "the bound is broken with slots enough"
    assert fullest <= facts[PlanFact.FULLEST_HOME], "replicas made it worse"
    assert facts[PlanFact.REPLICAS] == 0 or facts[PlanFact.FULLEST_HOME] > bound, "a copy without need"
    if fullest > bound:
        enough = ReplicaRule(**vars(rule) | {"slots": facts[PlanFact.SLOTS_NEEDED]})
        assert place_replicas(counts_WE.sum(0).tolist(), enough)[0].fullest <= bound, "the named slots do not do"
    return facts


def vectors(count: int) -> list[dict[str, Any]]:
    """All checks, by kind of load."""
    rows = {kind: {"kind": kind, "vectors": 0, "replicas": 0, "over_bound": 0} for kind in KINDS}
    for seed in range(count):
        kind, rule, counts = drawn(seed)
        facts, row = check(rule, counts), cast(dict[str, Any], rows[kind])
        row["vectors"] += 1
        row["over_bound"] += facts[PlanFact.FULLEST] > facts[PlanFact.BOUND]  # slots are too few
        row["replicas"] += facts[PlanFact.REPLICAS]
    return list(rows.values())


@cache
def loads_of(name: str) -> RecordedLoads:
    """Loads of three layers; those of W9 are the recorded ones."""
    ids = (all_choices(name, layer, TOKENS, EXPERTS, TOP_K, ranks=1) for layer in range(3))
    layers = tuple(tuple(ids_TK.flatten().bincount(minlength=EXPERTS).tolist()) for ids_TK in ids)
    return RecordedLoads(name, (layers,))


def steps() -> list[dict[str, Any]]:
    """Projected steps of each cluster and workload."""
    rows = []
    for chip, ranks in ON:
        sizes = (f"parallel.expert={ranks}", f"training.global_batch={2 * ranks}")
        run = load_run("deepseek-v2-lite", (*LITE, *sizes, *(IN_A_NODE if ranks <= MOST_PEERS else BY_COLLECTIVES)))
        cluster = parse_cluster(f"{ranks}x{chip}")
        for name in ("W9", "W8"):
            cases = balance_json(balance_cases(run, cluster, Assumptions(loads=loads_of(name))))["balance"]
            forced = cases[-1]["step_seconds"]
            for case in cases:
                rows.append({"on": f"{ranks} x {chip}", "loads": name, **case})
                rows[-1]["of_forced"] = forced / case["step_seconds"]
                print(rows[-1], flush=True)
    return rows


def quantiles() -> list[dict[str, Any]]:
    """Largest load over the mean by step, with the bias moved in both ways."""
    rows = []
    for experts, top_k, tokens in ((64, 6, 65_536), (256, 8, 65_536)):
        for rule in ("sign", "quantile"):
            generator = torch.Generator().manual_seed(0)
            popular_E, bias_E = torch.randn(experts, generator=generator), torch.zeros(experts)
            uneven = []
            for _ in range(12):
                logits_TE = torch.randn(tokens, experts, generator=generator) + popular_E
                margins_EU = margin_counts(logits_TE, bias_E, RouterRule(top_k=top_k, score="sigmoid"))
                slots_E = margins_EU[:, SIDE:].sum(1).float()
                uneven.append(round(float(slots_E.max() / slots_E.mean()), 3))
                if rule == "quantile":
                    bias_E = bias_E - quantile_shift(margins_EU, top_k)
                else:
                    bias_E = bias_E + 1e-3 * torch.sign(slots_E.mean() - slots_E)
            rows.append({"experts": experts, "top_k": top_k, "rule": rule, "max_over_mean": uneven})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    options = record.parser(__doc__, vectors=VECTORS).parse_args()
    torch.set_num_threads(1)
    with ProcessPoolExecutor(1) as pool:
        checked = pool.submit(vectors, options.vectors)
        numbers = {"steps": steps(), "quantiles": quantiles(), "vectors": checked.result()}
    for row in numbers["vectors"]:
        print(row, flush=True)
    record.write(options, numbers)


if __name__ == "__main__":
    main()
