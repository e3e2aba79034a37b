"""What a run is, said once: frozen, typed, every field with doc, unit and range. Nothing changes it after loading.

Reading order: `run` (the whole), `model`, `training`, `parallel` (its sections), `section` (what a field is), `rules`
(between fields), `fit` (to a number of ranks), `load` (preset or file plus overrides).
"""
