"""docs/environment.md, from the table of variables in penstock/parallel/launch/environment.py."""

from penstock.parallel.launch.environment import READ, RULES


def environment_page() -> str:
    """docs/environment.md."""
    cell = "| {} |".format
    rules = [
        cell(
            " | ".join(
                (
                    f"`{rule.name}`",
                    f"`{rule.value}`" if not rule.shown else rule.shown,
                    rule.when,
                    rule.why,
                    rule.source,
                )
            )
        )
        for rule in RULES
    ]
    also = [
        f"- `{rule.name}` is not set if the shell has set {' or '.join(f'`{name}`' for name in rule.also)}."
        for rule in RULES
        if rule.also
    ]
    read = [
        cell(f"{', '.join(f'`{name}`' for name in names.split(', '))} | {meaning}") for names, meaning in READ.items()
    ]
    return "\n".join([_PAGE, *rules, "", *also, "", _NOT_SET, *read, ""])


_PAGE = """# Environment variables

Written by `make docs` from [penstock/parallel/launch/environment.py](../penstock/parallel/launch/environment.py);
change it there.

## Variables that Penstock sets

Libraries read some settings only from the environment. Penstock sets these variables for itself and for the ranks
that it starts, if the condition in the column *when* holds. It does not change a variable that the shell has set, so
you can override each of them: `NCCL_NVLS_ENABLE=1 penstock train ...`. The log of a run without a terminal has them in
its head (`env`), and the scripts of `penstock launch` contain them ([launch.md](launch.md)). This command shows them
for a job on eight GPUs:

```bash run
penstock launch slurm deepseek-v2-lite parallel.expert=8 --nodes 1 --gpus-per-node 8
```

| variable | value | when | why | source |
| --- | --- | --- | --- | --- |"""

_NOT_SET = """Penstock does not set `TORCH_NCCL_AVOID_RECORD_STREAMS`, which recipes for older versions of PyTorch
set: its effect is the default in all supported versions, and the variable only causes a warning.

## Variables that Penstock reads

| variable | meaning |
| --- | --- |"""
