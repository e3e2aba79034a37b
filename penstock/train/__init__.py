"""A run while it trains.

Reading order: `loop`, `step`, `global_batch`, `passes`, `loss` (what happens); `optimizer`, `optimizer_shard`, `adamw`,
`streamed_adamw`, `schedule` (the update); `setup`, `rehearsal` (what a run is made of); `state`, `checkpoint`,
`manifest`, `parts`, `tensor_files`, `run_folder`, `export` (what is on disk); `observer`, `metrics`, `evaluate`,
`profile`, `diagnose`, `stop` (what is seen and told).
"""
