"""Pictures and pages: what a plan, and later a run, looks like.

Reading order: `figure` and `colours` (what a picture is), `timeline`, `stacks`, `curves` (the pictures), `tables` and
`page` (one HTML file that opens offline), `export` (PNG and SVG, drawn by a browser without a window).
"""
