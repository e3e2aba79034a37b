"""Models as Hugging Face keeps them: names and forms of weights, `config.json`, folders of safetensors.

A family is data. Reading order: `families` (the table), `forms` and `names` (what of ours a tensor there fills, and
how), `config` with `config_parts` (`config.json` both ways), `stored` (weights that are kept in 4 or 8 bits), `weights`
(whole models in and out).
"""
