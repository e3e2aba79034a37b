"""What a planner and a doctor know before anything is projected: rules with names, reasons and sources.

Reading order: `sizes` (what rules look at), `rule` (what a rule is), `legal` (what a run's own config would refuse, by
the same names), `prune` (layouts that are not worth a projection), `order` (what is only tried where nothing else
fits), `advice` (what stays, and is told), `book` (all of them, and how they are asked), `table` (the rules of others,
and what became of each). docs/rules.md is written from them.
"""
