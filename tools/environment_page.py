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
        f"- `{rule.name}` is left alone if the shell has set {' or '.join(f'`{name}`' for name in rule.also)}."
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

## What is set

Libraries read some choices from the environment and nowhere else. Penstock sets them, for itself and for the ranks
that it starts, where the run and the machine ask for it. A variable that the shell has set stays as it is, so each rule
can be overridden: `NCCL_NVLS_ENABLE=1 penstock train ...`. Every run prints what is in force in its first line, and the
scripts of `penstock launch` write it out ([launch.md](launch.md)).

| variable | value | when | why | source |
| --- | --- | --- | --- | --- |"""

_NOT_SET = """`TORCH_NCCL_AVOID_RECORD_STREAMS`, which recipes for older versions set, is not: what it asks for is the
default of every PyTorch that Penstock runs on, and the variable itself only brings a warning.

## What is read

| variable | meaning |
| --- | --- |"""
