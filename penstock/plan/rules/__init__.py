"""Rules that a planner and a doctor apply before a projection, each with a name, a reason and a source.

Reading order: `rule` (a rule, and the sizes that it reads), `prune` (layouts that are not worth a projection), `order`
(layouts that are tried only if nothing else fits), `advice` (printed about layouts that stay), `book` (all rules, those
of the config among them, and how they are asked). docs/rules.md is written from them.
"""
