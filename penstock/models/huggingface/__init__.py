"""Hugging Face formats: names and layouts of weights, `config.json`, folders of safetensors.

A family is data. Reading order: `family` (its fields), `families` and `dense_families` (the tables), `config` with
`config_parts` and `expert_parts` (`config.json` in both directions), `weights` (which tensor of a file fills which of
ours), `weight_folder` (files, and 4-bit or 8-bit storage), `tensor_file` (one file, read and written; checkpoints use
it too).
"""
