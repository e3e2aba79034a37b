"""Configuration of a run: frozen, typed, every field with doc, unit and range. A run never changes after loading.

Reading order: `run` (the whole), `model`, `parallel` (its sections), `schema` (sections, their fields, and problems),
`rules` (between fields), `fit` (sizes, and a number of ranks), `dispatcher`, `load` (preset or file plus overrides,
with `tree`, `follow` and `versions`), `explain` (documentation), `size` (parameters and FLOPs).
"""
