"""Figures and pages of plans and runs.

`figure` and `colours` (what a figure is), `timeline`, `stacks` and `curves` (figures), `frame` (one self-contained HTML
file), `page` (of a plan), `export` (PNG and SVG, drawn by a headless browser).

A run: `run_evidence` (everything known, read once), `run_page` (its sections and tables), `run_metrics`,
`run_timeline`, `run_operators`, `run_ranks` (figures).
"""
