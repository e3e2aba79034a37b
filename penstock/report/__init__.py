"""Pictures and pages: what a plan and a run look like.

Reading order: `figure` and `colours` (what a picture is), `timeline`, `stacks`, `curves` (the pictures), `frame` (what
makes a page one file), `tables` and `page` (a plan), `export` (PNG and SVG, drawn by a browser without a window).

A run: `run_evidence` (all that is known, read once), `run_page` (the list of its parts), `run_tables`, `thin` and
`run_curves`, `run_memory`, `run_steps` (which step, on what clock), `run_passes`, `run_lanes` and `run_timeline`,
`run_flame`, `run_roofline`, `run_ranks`, `run_experts`.
"""
