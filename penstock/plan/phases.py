"""The phases of a training run, as a command line names them: a ramp of batches, the run's tokens, longer rows."""

from dataclasses import dataclass

from penstock.base.errors import ConfigError
from penstock.base.numbers import amount

MOST_TOKENS = 1e15  # larger numbers are typing errors


@dataclass(frozen=True, kw_only=True)
class TrainingPhase:
    """Consecutive steps of one kind."""

    tokens: float  # to train on
    sequence_length: int | None = None  # None for the run's
    batch_tokens: float | None = None  # of a step; None for the run's


def phases_of(tokens: str | None, ramp: str | None, stages: str | None) -> tuple[TrainingPhase, ...]:
    """The phases that the command line asks for, in the order of training.

    `tokens` are those of the whole run at its own sequence length, the ramp's included: `2T`. `ramp` are first
    batches, `4M:100B`: tokens of a step, and to train on. `stages` are later sequence lengths with tokens, `32k:500B`.
    Raises a ConfigError if a text cannot be read, or the ramp has more tokens than the run.
    """
    phases = [
        TrainingPhase(tokens=part, batch_tokens=_tokens("--ramp", batch)) for batch, part in _pairs("--ramp", ramp)
    ]
    if tokens is not None:
        rest = _tokens("--tokens", tokens) - sum(phase.tokens for phase in phases)
        if rest < 0:
            allowed = f"at most {tokens} in all"
            raise ConfigError("--ramp has more tokens than the run", got=ramp, allowed=allowed, fix="raise --tokens")
        phases += [TrainingPhase(tokens=rest)] if rest else []
    for text, part in _pairs("--stages", stages):
        # 4k positions are 4,096: sequence lengths are counted in powers of two.
        count, unit = text[:-1], text[-1:].lower()
        length = int(count) * 1024 if unit == "k" and count.isdecimal() else round(_tokens("--stages", text))
        phases.append(TrainingPhase(tokens=part, sequence_length=length))
    return tuple(phases)


def _pairs(option: str, text: str | None) -> list[tuple[str, float]]:
    pairs = []
    for part in text.split(",") if text else ():
        name, colon, tokens = part.strip().partition(":")
        if not colon:
            raise ConfigError(f"{option} is a list of pairs", got=repr(part), allowed="32k:500B,128k:100B")
        pairs.append((name.strip(), _tokens(option, tokens)))
    return pairs


def _tokens(option: str, text: str) -> float:
    number = amount(text)
    if number is None or not 0 < number <= MOST_TOKENS:
        raise ConfigError(f"{option} has no number of tokens", got=repr(text), allowed="500M, 2B or 14.8T")
    return number
