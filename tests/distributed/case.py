"""A layout that is played beside one process, and the words that make one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layout.

    Attributes:
        name: of the layout, in the words of the field.
        overrides: what makes the layout, on top of BASE.
        model: what changes the model or the data, for the single process too.
    """

    name: str
    ranks: int
    overrides: tuple[str, ...]
    model: tuple[str, ...] = ()


def layout(*settings: str) -> tuple[str, ...]:
    """Overrides of the section `parallel`, and whole paths as they are."""
    return tuple(setting if "." in setting else f"parallel.{setting}" for setting in settings)


SCHEDULES_V = ("zb-v", "v-half", "v-min", "dualpipe-v")
GQA = (
    'model.attention.kind="gqa"',
    "model.attention.heads=4",
    "model.attention.kv_heads=2",
    "model.attention.head_dim=16",
    'model.family="plain"',
)
DOCUMENTS = ("data.document_mask=true",)


def pipeline(schedule: str, ranks: int = 4, *more: str) -> tuple[str, ...]:
    """A pipeline by name of its schedule, with the stages per rank that it needs."""
    stages = 2 if schedule in SCHEDULES_V or schedule == "interleaved" else 1
    settings = (f"pipeline={ranks}", f"pipeline.schedule={schedule}", f"pipeline.stages_per_rank={stages}")
    return layout(*settings, *more)
