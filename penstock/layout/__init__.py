"""Layouts of a run in integers only, without torch: the parts of each rank, and the order of its work.

Reading order: `grid` (axes of the ranks), `sharding` (parts of parameters), `matrices` (their owners with Muon),
`experts` and `sequence` (parts of a layer's experts, and of a row), `stages` (parts of a pipeline), `actions`,
`schedules`, `clock` (the time of a schedule).
"""
