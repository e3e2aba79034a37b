"""Who holds what and who does what when, in integers only, no torch.

Reading order: `grid` (ranks, seen twice), `pieces` and `rectangles` (parts of parameters), `experts` and `sequence`
(parts of a layer's experts, and of a row), `stages` (parts of a pipeline), `actions`, `schedules`, `phrases`, `blocks`
(its order), `clock` (what an order costs).
"""
