"""Used by every other folder; imports none of them.

Reading order: `errors`, `shapes` (the legend of dimension letters), `spans` (names in traces), `devices` (known chips),
`numbers` (as text), `files` (that a user names), `child` (a process for what may end it), `interrupts`,
`origin` (what made a file).
"""
