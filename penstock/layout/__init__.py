"""Layouts of a run in integers only, without torch: the parts of each rank, and the order of its work.

Reading order: `grid` (axes of the ranks, their experts and positions), `sharding` (parts of parameters, and owners of
matrices with Muon), `stages` (parts of a pipeline), `actions` (and the time of a schedule), `schedules`.
"""
