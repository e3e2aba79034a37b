"""The model: its modules, for one device or one rank of many, and the code that builds them from a configuration.

Reading order: `model_inputs` (inputs of a pass), `decoder`, `block`, `attention`, `mla`,
`compressed`, `residual` (several streams); below them `linear`, `norm`;
`build` and `rank_model` (from a configuration to what a rank trains), `kernels`;
`parameters`; `huggingface` (weights and configs of other programs).
"""
