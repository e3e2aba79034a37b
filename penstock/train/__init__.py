"""A run while it trains.

Reading order: `loop`, `step`, `global_batch`, `passes`, `loss`, `capture` (a training step); `optimizer`, `adamw`,
`muon`, `schedule` (the update); `setup` (construction of a run); `state`, `checkpoint`, `manifest`,
`run_folder`, `saved_weights`, `export`, `import_weights` (files); `observer`, `metrics`, `sinks`, `profile`,
`diagnose`, `stop` (reports and control); `generate`, `batch_contents` (tools on a trained run).
"""
