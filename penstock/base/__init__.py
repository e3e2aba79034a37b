"""What everything else uses; imports nothing of ours.

Reading order: `errors`, `shapes` (the legend of dimension letters), `spans` (names in traces), `devices` (known chips).
"""
