"""Rules that a planner and a doctor apply before a projection, each with a name, a reason and a source.

Reading order: `rule` (a rule, and the sizes that it reads), `advice` (what guides say against a layout; times decide),
`book` (all rules, those of the config among them, and how they are asked). docs/rules.md is written from them.
"""
