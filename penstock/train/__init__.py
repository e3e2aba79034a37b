"""A run while it trains.

Reading order: `loop`, `step`, `passes`, `capture` (a training step); `optimizer`, `adamw`, `muon` (the
update); `setup` (construction of a run); `state`, `checkpoint`, `manifest`, `run_folder`, `saved_weights`,
`weight_exchange` (files); `observer`, `metrics`, `sinks`, `profile`, `diagnose` (reports);
`saved_model`, `batch_contents` (tools on a trained run).
"""
