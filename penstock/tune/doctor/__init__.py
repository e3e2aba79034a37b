"""`penstock doctor`: the bottleneck of a run, the evidence for it, and the gain of each remedy.

    evidence     costs of each rank, late ranks, facts of the run; and how the step divides into bottlenecks
    run_facts    reads the folder of a run: configuration and metrics
    from_trace   reads traces: costs of each rank, and which ranks came late and why
    planned      adds the plan of the run, and what the plan projects for each change; imports PyTorch
    remedy       the form of a remedy, how a rule is made, and parts of a loss that one change can save
    remedies     one function for each change that can help
    diagnosis    the conclusion, as a sentence, as lines of evidence and as JSON

The printed text says "wall" for bottleneck. Every number in it is in a trace, in the metrics or in the plan, and every
threshold is a constant with its reason, so the same files always give the same diagnosis.
"""
