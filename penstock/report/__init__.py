"""Figures and pages of plans and runs.

`figure` (what a figure is, and colours), `timeline` and `stacks` (figures), `frame` (one self-contained HTML file),
`page` (of a plan, with curves of what-ifs, PNG and SVG).

A run: `run_evidence` (everything known, read once), `run_page` (sections and tables; two recordings), `run_metrics`,
`run_timeline`, `run_traces` (figures).
"""
