"""`penstock sample`: text from the weights of a run.

    penstock sample runs/first "def "                      the most probable token each time
    penstock sample runs/first "def " --temperature 0.8    drawn by their probabilities; --seed draws others
    penstock sample runs/first "def " --step 400           by an older checkpoint
    penstock sample qwen "Once"                            by weights that penstock import wrote

The text goes on until the model ends the document, until --tokens, or until prompt and text fill the context that the
run was trained with. A GPU computes if there is one. Nothing of the run is changed, so it may still be training.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import DataError
from penstock.cli.output import print_next
from penstock.cli.verbs import Checkpoint
from penstock.config.run import Run
from penstock.data.open import Vocabulary, vocabulary_of
from penstock.parallel.launch.environment import read_environment
from penstock.parallel.launch.process import choose_device, prepare_process
from penstock.train.saved_model import SamplingRule, generate, load_decoder, text_pieces
from penstock.train.saved_weights import chosen_step, open_saved, read_chosen


def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of penstock import.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help='What the text begins with; "" begins a document.')],
    *,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to add at most.")] = 200,
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0.0, help="0 takes the most probable token; 1 draws as the model says."),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="Draw from the most probable tokens up to this share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws.")] = 0,
    step: Checkpoint = None,
) -> None:
    """Print text from the weights of a run, as it is made."""
    config, store = open_saved(run)
    chosen_step(store, run, step)  # refuses a step without a checkpoint
    vocabulary = vocabulary_of(config.data)
    prompt = _prompt(config, vocabulary, text)
    device = choose_device("auto")  # the run may have trained elsewhere
    prepare_process(read_environment(), seed=seed, deterministic=False)
    _, decoder = read_chosen(store, run, step, lambda chosen: load_decoder(config, store, chosen, device))
    ids = generate(
        decoder,
        prompt,
        limit=min(tokens, config.training.sequence_length - len(prompt)),  # the model knows no later positions
        end=vocabulary.end_of_document,
        vocabulary=vocabulary.tokenizer.vocab_size,  # ids beyond it stand for no text
        rule=SamplingRule(temperature=temperature, top_p=top_p, seed=seed),
    )
    sys.stdout.write(text)
    for piece in text_pieces(vocabulary.tokenizer, prompt, ids):
        sys.stdout.write(piece)
        sys.stdout.flush()  # text appears as it is made
    print()
    if sys.stdout.isatty():  # a file or pipe gets the text alone
        print_next("export", run, f"{run.name}-weights")


def _prompt(run: Run, vocabulary: Vocabulary, text: str) -> list[int]:
    """Token ids of the text; for an empty text the end of the document before it."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError("the text is not UTF-8", got=ascii(text[:40]))
    # As between documents in training.
    prompt: list[int] = vocabulary.tokenizer.encode(text).tolist() or [vocabulary.end_of_document]
    length, size = run.training.sequence_length, run.model.vocab_size
    if len(prompt) >= length:
        raise DataError(
            "the text leaves no room in the context of the run",
            got=f"{len(prompt):,} tokens",
            allowed=f"at most {length - 1:,}, one less than training.sequence_length",
            fix="give a shorter text",
        )
    if max(prompt) >= size:
        raise DataError(
            f"the tokenizer {vocabulary.setting} has ids outside the model's vocabulary",
            got=max(prompt),
            allowed=f"0 to {size - 1}",
        )
    return prompt
