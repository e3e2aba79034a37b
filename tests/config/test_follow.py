"""What a preset says gives way to what the user wrote; what the user wrote is refused or stays."""

from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.config.load import RUN_FILE, dump_toml, load_run, with_overrides
from penstock.config.presets.debug import debug
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.config.schema import leaves

ONE_OVERRIDE = (
    *(f"training.steps={steps}" for steps in (1, 2, 5, 12, 100)),
    *(f"training.sequence_length={length}" for length in (2, 64, 1000)),
    *(f"training.micro_batch={rows}" for rows in (2, 3, 8)),
    *(f"training.global_batch={rows}" for rows in (1, 2, 6)),
    *(f"model.layers={layers}" for layers in (1, 2, 3, 100)),
    *("schedule.decay=wsd", "profile.start=1", "data.validation_share=0.0", "pipeline.schedule=zb-v"),
)
ONE_OVERRIDE_OF_EXPERTS = (
    *("model.moe.top_k=1", "model.moe.balance.aux_loss=none", "model.dense_layers=0"),
    *("model.moe.router.scoring_func=softmax", "model.moe.router.scoring_func=sigmoid"),
)


@pytest.mark.parametrize("name", PRESETS)
def test_one_override_of_any_preset_is_not_refused_for_what_the_user_did_not_write(name: str) -> None:
    for override in (*ONE_OVERRIDE, *(ONE_OVERRIDE_OF_EXPERTS if PRESETS[name]().model.moe is not None else ())):
        path, _, text = override.partition("=")
        value = leaves(load_run(name, [override]))[path]
        assert f"{value}".lower() == text, f"{override} was changed"


@pytest.mark.parametrize(
    ("target", "overrides", "message"),
    [
        ("deepseek-v3", ["model.moe.experts=4"], "model.moe.top_k is more than model.moe.experts"),
        ("deepseek-v3", ["model.moe.experts=12"], "model.moe.router.n_group must divide model.moe.experts"),
        ("deepseek-v3", ["model.moe.top_k=200"], "fix: raise model.moe.router.topk_group"),
        ("qwen3-8b", ["model.attention.heads=12"], "model.attention.kv_heads must divide"),
        ("mixtral-8x7b", ["model.dense_layers=1"], "model.intermediate_size .* fix: set it"),
        ("gpt-oss-20b", ["model.moe.router.apply_probs_on_input=true"], "model.moe.bias"),
        ("llama3.1-8b", ["model.attention.rope.yarn.factor=4"], 'fix: set one of the two to "none"'),
        ("llama4-scout", ["model.attention.local.global_every=0"], "global_rope is for global layers"),
        ("debug", ["parallel.pipeline=2", "pipeline.stages_per_rank=2"], "or pipeline.schedule=interleaved"),
        ("debug", ["parallel.pipeline=2", "dispatch.overlap=passes"], "fix: set pipeline.schedule=interleaved"),
    ],
)
def test_a_value_that_changes_the_model_or_the_layout_never_follows(
    target: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(target, overrides)


@pytest.mark.parametrize(
    ("target", "overrides", "followed"),
    [
        ("debug", ["training.steps=12"], {"schedule.warmup_steps": 1}),  # a tenth of the steps
        ("deepseek-v3", ["training.steps=100"], {"schedule.warmup_steps": 10}),
        ("debug", ["training.micro_batch=8"], {"training.global_batch": 8}),
        ("deepseek-v2-lite", ["training.micro_batch=3"], {"training.global_batch": 510}),  # 512 rounded down
        ("debug", ["training.global_batch=6"], {"training.micro_batch": 2}),  # gcd(6, 4)
        ("debug", ["training.steps=1", "profile.start=1"], {"profile.steps": 1, "schedule.warmup_steps": 0}),
        ("debug", ["schedule.decay=wsd", "schedule.decay_steps=8", "training.steps=20"], {"schedule.warmup_steps": 12}),
        ("debug", ["data.validation_share=0"], {"evaluation.rows": 0}),
        ("deepseek-v3", ["model.layers=2"], {"model.dense_layers": 1}),  # one layer with experts stays
        ("llama4-maverick", ["model.layers=1"], {"model.moe.moe_layer_freq": 1}),  # the only layer has experts
        ("qwen3-8b", ["model.layers=3"], {"model.dense_layers": 3}),
        ("debug", ["model.moe=none"], {"model.dense_layers": 4}),
        ("debug", ["parallel.pipeline=2", "pipeline.schedule=zb-v"], {"pipeline.stages_per_rank": 2}),
        (
            "debug",
            ["parallel.pipeline=2", "dispatch.overlap=passes", "pipeline.schedule=interleaved"],
            {"pipeline.stages_per_rank": 2},
        ),
        ("debug", ["model.moe.top_k=1"], {"model.moe.router.norm_topk_prob": False}),
        ("mixtral-8x7b", ["model.moe.router.scoring_func=sigmoid"], {"model.moe.router.softmax_after_top_k": False}),
        ("debug", ["parallel.expert=2", "graphs.capture=full"], {"dispatch.sync_free": 2}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_value_follows_what_was_written(target: str, overrides: list[str], followed: dict[str, object]) -> None:
    values = leaves(load_run(target, overrides))
    assert {path: values.get(path) for path in followed} == followed


def test_values_of_a_preset_below_a_file_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text('preset = "debug"\n[training]\nsteps = 12\n')
    assert load_run(str(path)).schedule.warmup_steps == 1


@pytest.mark.parametrize("where", ["file", "override"])
def test_what_was_written_is_refused_and_never_changed(where: str, tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text('preset = "debug"\n' + ("[schedule]\nwarmup_steps = 20\n" if where == "file" else ""))
    own = ["schedule.warmup_steps=20"] if where == "override" else []
    with pytest.raises(ConfigError, match=r"schedule.warmup_steps is more than training.steps \(12\)"):
        load_run(str(path), ["training.steps=12", *own])


def test_a_section_that_was_written_covers_its_fields() -> None:
    with pytest.raises(ConfigError, match="training.global_batch must be a multiple"):
        load_run("debug", ["training={steps=4, sequence_length=8, micro_batch=3, global_batch=4}"])


def test_ranks_never_change_what_is_trained() -> None:
    with pytest.raises(ConfigError, match="model.vocab_size must be a multiple"):
        load_run("debug", ["parallel.tensor=2"])
    with pytest.raises(ConfigError, match="training.sequence_length must be a multiple"):
        load_run("debug", ["parallel.context=3", "parallel.context_method=all-gather"])


def test_a_new_run_from_the_configuration_of_another_follows_and_one_that_goes_on_does_not(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(dump_toml(debug()))
    config = str(tmp_path / RUN_FILE)
    assert load_run(config, ["training.steps=12"]).schedule.warmup_steps == 1
    with pytest.raises(ConfigError, match="schedule.warmup_steps is more"):
        load_run(config, ["training.steps=12"], follows=False)


def test_a_run_that_obeys_the_rules_is_never_changed() -> None:
    def same(run: Run) -> bool:
        return with_overrides(run, ["seed=0"]) == run  # all presets have seed 0

    assert all(same(make()) for make in PRESETS.values())
