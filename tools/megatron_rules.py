"""The rules of Megatron-Core and Megatron Bridge for such layouts, in our words, and what became of each here.

Collected in August 2026 from documents and code of Megatron-Core 0.20 and Megatron Bridge. An entry has one of these
verdicts:

    config        a rule of `penstock.config` refuses the run; `rules` names it
    plan          a rule here; `rules` names it
    projection    memory and times say it case by case, without a rule
    environment   a variable that is set where it applies (docs/environment.md)
    doctor        a question about a run that was measured; a plan has nothing to ask
    moot          cannot happen here; `why` says by what
    theirs        about options or libraries that this project does not have

`rules` names what enforces it, kebab-case, also beside another verdict where a part of it is a rule.
"""

from typing import Literal, NamedTuple

Verdict = Literal["config", "plan", "projection", "environment", "doctor", "moot", "theirs"]


class Entry(NamedTuple):
    """One rule of others.

    Attributes:
        name: its number, by topic: W workflow, L layout, R router and numerics, D dispatch, O overlap, M memory, G
            graphs, P precision.
        says: what it says.
        verdict: what became of it.
        rules: names of ours that stand for it.
        why: the reason for the verdict, where it needs one.
    """

    name: str
    says: str
    verdict: Verdict
    rules: tuple[str, ...] = ()
    why: str = ""


_NO_OPTION = "there is no such option"

LAYOUT = (
    Entry(
        "W",
        "fit with the least model parallelism, then scale, profile, retune one thing at a time",
        "plan",
        ("tensor-only-to-fit", "selective-before-full", "expert-product-inside-node", "context-from-8k"),
        "fitting is the order of the search; the rest is the ladder's and the doctor's",
    ),
    Entry("L1", "both views of the ranks divide them", "config", ("sizes-divide-the-ranks",)),
    Entry("L2", "fewest ranks: PP x the larger of both views", "config", ("sizes-divide-the-ranks",)),
    Entry(
        "L3",
        "EP divides experts",
        "config",
        ("expert-ranks-divide-experts", "experts-have-ranks-only-if-there-are-any"),
    ),
    Entry("L4", "TP divides heads and key/value heads", "config", ("tensor-ranks-divide-heads",)),
    Entry("L5", "sequence parallelism with TP", "moot", (), "ranks of TP always share the positions as well"),
    Entry(
        "L6",
        "a row has 2 x CP chunks; exchanging heads needs heads",
        "config",
        ("ranks-divide-the-sequence", "ulysses-divides-heads"),
        "multi-token prediction works under CP here",
    ),
    Entry(
        "L7",
        "CP from 8K, 4K to 8K positions a rank",
        "plan",
        ("context-from-8k", "context-for-long-rows"),
    ),
    Entry(
        "L8",
        "TP by active parameters, never over nodes",
        "plan",
        ("tensor-inside-node", "tensor-only-to-fit"),
    ),
    Entry("L9", "EP before ETP", "plan", ("expert-before-tensor",), "experts have no biases here"),
    Entry(
        "L10",
        "EP and TP inside the fast link",
        "plan",
        ("expert-product-inside-node", "tensor-inside-node", "experts-over-nodes-want-overlap"),
        "both views are chosen apart, so the product is EP x ETP",
    ),
    Entry(
        "L11",
        "sizes by total parameters",
        "plan",
        ("small-model-without-pipeline", "tensor-only-to-fit"),
        "above 20B the projection decides",
    ),
    Entry(
        "L12",
        "several stages a rank; not too many",
        "plan",
        ("stages-when-pipeline", "micro-batches-fill-the-pipeline"),
        "what messages cost is in the clock",
    ),
    Entry(
        "L13",
        "layers divide into stages, or a layout says how",
        "config",
        ("layout-can-be-read", "pipeline-has-enough-layers", "stages-are-even"),
        "uneven cuts are allowed; advice tells what they cost",
    ),
    Entry(
        "L14",
        "prediction layers in one last stage, balanced ends",
        "config",
        ("layout-can-be-read", "stages-are-even"),
        "stages are cut by cost, embedding, prediction and loss counted",
    ),
    Entry("L15", "PP takes from DP, about 6 % for a half", "projection"),
    Entry("L16", "messages as precise as the residual stream", "moot", (), "messages have the stream's own type"),
    Entry("L17", "the optimizer's share of an expert does not depend on EP", "projection", (), "counted on the model"),
    Entry("L18", "FSDP with TP 1 to 2", "plan", ("full-shards-with-tensor", "whole-weights-in-pipeline")),
)

ROUTER = (
    Entry("R1", "router in float32 from 32 experts on", "moot", (), "it always is"),
    Entry("R2", "top-1 weights have a gradient", "config", ("router-has-a-gradient",)),
    Entry(
        "R3",
        "expert bias with sigmoid, in float32, once a batch",
        "moot",
        (),
        "the bias goes with every score, and the other two cannot be chosen",
    ),
    Entry(
        "R4",
        "quantile balancing without auxiliary loss, fused router and groups",
        "config",
        ("quantiles-move-a-bias",),
        "a loss may stand beside it",
    ),
    Entry("R5", "sinkhorn without auxiliary loss", "theirs", (), _NO_OPTION),
    Entry("R6", "a coefficient for each kind of loss", "theirs", (), "there is one kind at a time"),
    Entry(
        "R7", "capacity, padding, dispatchers that pad", "config", ("padding-needs-a-capacity", "padded-rows-are-sent")
    ),
    Entry("R8", "groups divide experts", "config", ("groups-divide-experts",)),
    Entry("R9", "auxiliary loss scaled as the main one", "moot", (), "both are divided by the same count"),
    Entry("R10", "bf16 sums of gradients up to DP 128", "plan", ("sums-over-many-in-fp32",)),
    Entry("R11", "forced balance is for benchmarks", "plan", ("natural-routing",), "and every log says so"),
    Entry("R12", "what stays unquantised", "moot", (), "routers, embedding, head, norms and sums never are in 8 bits"),
    Entry(
        "R13",
        "known faults of 8-bit pretraining",
        "theirs",
        (),
        "a fault of their releases; docs/float8.md has our curves",
    ),
    Entry("R14", "losses are compared on the same rows", "moot", (), "the ladder gives all steps the same rows"),
    Entry("R15", "weights before the second product need scaled biases", "moot", (), "experts have no biases"),
    Entry("R16", "a logged loss is divided in place", "theirs"),
    Entry("R17", "settings of deterministic runs", "environment", (), "`training.deterministic`"),
)

DISPATCH = (
    Entry("D1", "begin with all-to-all, compare on the final settings", "moot", (), "all dispatchers are ours"),
    Entry("D2", "a backend needs the right type beside it", "moot", (), "`dispatch.method` is one choice"),
    Entry("D3", "a missing package fails when the model is built", "moot", (), "so it does, in one line"),
    Entry("D4", "which GPUs a backend has", "moot", (), "a dispatcher that cannot be had is not searched"),
    Entry("D5", "multiprocessors for dispatch", "projection", (), "`dispatch.num_sms`; measured, not planned"),
    Entry("D6", "gather only among few ranks", "plan", ("gathers-if-fewer-copies",)),
    Entry(
        "D7",
        "gathering and quantised padding",
        "moot",
        (),
        "copies are padded on the device; every dispatcher sends 8 bits",
    ),
    Entry("D8", "rows of several lengths", "moot", (), "all rows of a run have one length"),
    Entry("D9", "DeepEP's network settings", "theirs"),
    Entry("D10", "versions of DeepEP that hang", "theirs"),
)

OVERLAP = (
    Entry(
        "O1",
        "what overlap of EP goes with",
        "config",
        (
            "tokens-travel-to-experts",
            "travels-happen-once",
            "passes-stand-beside-each-other",
        ),
        "several prediction layers are fine",
    ),
    Entry("O2", "weight gradients put off", "moot", (), "schedules split them, overlap does not"),
    Entry(
        "O3",
        "overlap pays over nodes, hardly among 4 ranks",
        "plan",
        ("experts-over-nodes-want-overlap", "overlap-if-exposed"),
    ),
    Entry("O4", "try one kind at a time", "doctor", ("overlap-if-exposed",), "steps of the ladder"),
    Entry("O5", "shared-expert overlap or EP overlap", "moot", (), "`dispatch.overlap` is one choice"),
    Entry("O6", "gathering ahead needs a divided optimizer", "moot", (), "`parallel.shard` is one choice"),
    Entry("O7", "gathering within the optimizer's step", "theirs", (), _NO_OPTION),
    Entry("O8", "summing gradients during backward may hurt MoE", "moot", (), "they are summed once, after the passes"),
    Entry("O9", "overlap of TP's sums", "theirs", (), "Transformer Engine's"),
    Entry("O10", "overlapped messages only with several stages", "moot", (), "messages never block, in any schedule"),
    Entry("O11", "buckets count elements", "moot", (), "one size, not to be chosen"),
    Entry("O12", "multiprocessors left by norms", "theirs", (), "Transformer Engine's"),
    Entry(
        "O13",
        "smaller sums, and fewer ranks in them",
        "plan",
        ("sums-over-many-in-fp32",),
        "`parallel.reduce`, `parallel.shard_size`",
    ),
)

MEMORY = (
    Entry("M1", "segments that grow, before anything else", "environment"),
    Entry("M2", "allocated against reserved, on every rank", "doctor"),
    Entry("M3", "a control without recomputation; one change at a time", "doctor", (), "the ladder's control"),
    Entry("M4", "scores need no recomputation", "plan", ("long-rows-attend-once",), "no kernel here keeps them"),
    Entry(
        "M5",
        "parts before experts before layers",
        "plan",
        ("selective-before-full",),
        "among parts the projection decides",
    ),
    Entry("M6", "the order is a model's own", "projection", ("selective-before-full",)),
    Entry("M7", "what can be computed again", "config", ("recomputed-modules-exist", "travels-happen-once")),
    Entry(
        "M8",
        "8-bit and recomputation",
        "moot",
        (),
        "scales are those of the numbers at hand, so any part may be computed again",
    ),
    Entry("M9", "full recomputation has a method and a count", "moot", ("selective-before-full",), "one list of names"),
    Entry("M10", "long rows: all but attention", "plan", ("long-rows-attend-once",)),
    Entry(
        "M11",
        "offloaded activations: no pipeline, no graphs",
        "config",
        ("captured-copies-stay-on-the-device",),
    ),
    Entry("M12", "fine-grained offload", "config", ("offloaded-modules-exist",)),
    Entry("M13", "the optimizer leaves the device last", "plan", ("optimizer-on-the-device",)),
    Entry("M14", "paged stash", "theirs", (), _NO_OPTION),
    Entry("M15", "bf16 moments", "moot", (), "moments are float32"),
    Entry("M16", "adapters gather again", "theirs", (), "this project pretrains"),
)

GRAPHS = (
    Entry("G1", "only where the host is late", "doctor", (), "the time core counts launches"),
    Entry(
        "G2",
        "what of a layer without fixed rows can be captured",
        "config",
        ("captured-shapes-are-known", "captured-parts-are-kept"),
    ),
    Entry(
        "G3",
        "no capture across what the host reads",
        "config",
        ("captured-shapes-are-known", "sent-rows-are-counted-by-the-host"),
    ),
    Entry("G4", "fixed lengths and micro-batches", "moot", (), "a run has one of each"),
    Entry("G5", "a tracker of random numbers", "moot", (), "passes draw none"),
    Entry("G6", "no checks for NaN within", "moot", (), "they stand behind the passes"),
    Entry("G7", "recomputation wholly in or out", "config", ("captured-parts-are-kept",)),
    Entry("G8", "graphs and offload", "config", ("captured-copies-stay-on-the-device",)),
    Entry("G9", "no registered buffers with growing segments", "environment"),
    Entry("G10", "a graph's pool costs memory", "projection", ("captured-passes-are-not-cut-into-stages",)),
    Entry("G11", "capture stays out of timing", "moot", (), "the ladder's warm-up is longer"),
    Entry("G12", "graphs go before communicators", "moot", (), "a run gives them up at its end"),
)

PRECISION = (
    Entry("P1", "stable in bf16 first", "doctor", (), "16 bits are the default; auto takes the chip's recipe"),
    Entry("P2", "judge by time, not by utilization", "plan", (), "the search ranks by tokens/s"),
    Entry("P3", "what 8 bits gain", "doctor", (), "offered only where the plan of the same run in 8 bits is faster"),
    Entry("P4", "8-bit parameters", "config", ("gathered-bits-are-multiplied",)),
    Entry("P5", "padding for 8 bits", "moot", (), "copies are padded on the device, not tokens"),
    Entry(
        "P6", "8 bits move the wall", "doctor", (), "nothing in 8 bits is offered to a device that waits for its host"
    ),
)

TABLE: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    ("Workflow and layout", LAYOUT),
    ("Router, balance, numerics", ROUTER),
    ("Dispatch", DISPATCH),
    ("Overlap", OVERLAP),
    ("Recomputation and offload", MEMORY),
    ("Graphs", GRAPHS),
    ("Precision", PRECISION),
)
"""All entries, by topic."""
