"""What a run is, said once: frozen, typed, every field with doc, unit and range. Nothing changes it after loading.

Reading order: `run` (the whole), `model`, `training`, `rules` (between fields), `load` (preset or file plus overrides).
"""
