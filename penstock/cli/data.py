"""`penstock data`: look at what a model is fed, and encode text once for many runs.

    penstock data inspect TARGET                        what batches of a run hold
    penstock data pack FILES --output PREFIX ...        text to tokens, in Megatron's .bin and .idx
    penstock data tokenizer train FILES ...             a tokenizer from text

Each verb has its own module, which only it loads: packing needs no PyTorch.
"""

import typer

from penstock.cli.verbs import Verb, group_of

VERBS = (
    Verb("inspect", "penstock.cli.data_inspect", "inspect", "Show what the batches of a run really hold."),
    Verb("pack", "penstock.cli.data_pack", "pack_texts", "Encode text once, into files that Megatron reads too."),
    Verb("tokenizer", "penstock.cli.data_tokenizer", "app", "Train a tokenizer."),
)

app = typer.Typer(cls=group_of(*VERBS), add_completion=False)


@app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """Inspect batches, pack text, train tokenizers."""
    if context.invoked_subcommand is None:
        print(context.get_help())
