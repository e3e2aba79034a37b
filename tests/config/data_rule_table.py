"""Rules of `data`: how each breaks, with the line that the user reads, and what is possible."""

from penstock.config import data_rules as rules
from penstock.config.rules import Rule

TEXT = ("data.source=text", "data.files=a.txt")
WEB = ("data.mixture.web.source=jsonl", "data.mixture.web.files=a.jsonl", "data.mixture.web.weight=3.0")
CODE = ("data.mixture.code.source=text", "data.mixture.code.files=code/", "data.mixture.code.weight=1.0")
C4 = ("data.source=huggingface", "data.dataset=allenai/c4", "data.dataset_config=en")
TOKENIZER = ("data.tokenizer=t.json",)

BROKEN: list[tuple[Rule, tuple[str, ...], str]] = [
    (
        rules.file_sources_have_files,
        ("data.source=jsonl",),
        "data.files is empty, but data.source jsonl reads files; fix: set data.files to the files to train on",
    ),
    (
        rules.other_sources_have_no_files,
        ("data.files=a.txt",),
        "data.files is given, but data.source standard-library reads no files; got a.txt; "
        "fix: set data.source to text, jsonl, parquet or packed",
    ),
    (
        rules.other_sources_have_no_files,
        ("data.source=synthetic-random", "data.validation_files=a.txt"),
        "data.validation_files is given, but data.source synthetic-random reads no files; got a.txt; "
        "fix: set data.source to text, jsonl, parquet or packed",
    ),
    (
        rules.held_out_files_are_not_trained_on,
        (*TEXT, 'data.validation_files=["b.txt", "a.txt"]'),
        "data.validation_files has files of data.files: the model would be judged on what it learned; got a.txt; "
        "fix: take them out of one of the two",
    ),
    (
        rules.evaluation_has_text,
        (*TEXT, "data.validation_share=0.0"),
        "data.validation_share holds out no text for evaluation.rows; got 0; "
        "fix: raise it, give data.validation_files, or set evaluation.rows to 0",
    ),
    (
        rules.vocabulary_holds_every_byte,
        ("model.vocab_size=256",),
        "model.vocab_size is too small for data.tokenizer bytes; got 256; "
        "allowed: >= 257 (256 bytes and the end of a document)",
    ),
    (
        rules.vocabulary_holds_the_synthetic_language,
        ("data.source=synthetic-learnable", "model.vocab_size=4"),
        "model.vocab_size is too small for data.source synthetic-learnable; got 4; allowed: >= 5",
    ),
    (
        rules.bytes_have_one_end,
        ("data.end_of_document=</s>",),
        "data.end_of_document names a token, but data.tokenizer bytes has its own end of a document; got '</s>'; "
        "fix: leave it out, or set data.tokenizer to a tokenizer.json",
    ),
    (
        rules.a_mixture_is_of_parts_only,
        (*WEB, *TEXT),
        "data.source is given beside data.mixture, whose parts have their own; "
        "fix: leave it out, or move it to data.mixture.web.source",
    ),
    (
        rules.parts_have_plain_names,
        ("data.mixture.a b.source=text", "data.mixture.a b.weight=1.0"),
        "data.mixture has a part without a plain name; got 'a b'; "
        "allowed: up to 50 letters, digits, '_' and '-', the first a letter or digit",
    ),
    (
        rules.parts_have_weight,
        (*WEB, *CODE, "data.mixture.code.weight=0.0"),
        "data.mixture.code.weight must be above 0; got 0; fix: or leave the part out",
    ),
    (
        rules.file_sources_have_files,
        (*WEB, *CODE, "data.mixture.code.files=[]"),
        "data.mixture.code.files is empty, but data.mixture.code.source text reads files; "
        "fix: set data.mixture.code.files to the files to train on",
    ),
    (
        rules.datasets_have_a_name,
        ("data.source=huggingface",),
        "data.dataset is empty, but data.source huggingface needs it",
    ),
    (
        rules.datasets_have_a_name,
        (*TEXT, "data.streaming=true"),
        "data.streaming is given, but data.source text is no dataset of Hugging Face; "
        "fix: leave it out, or set data.source to huggingface",
    ),
    (
        rules.held_out_splits_are_not_trained_on,
        (*C4, "data.validation_split=train"),
        "data.validation_split is data.split: the model would be judged on what it learned; got train; "
        "fix: leave it out to hold out a share of the documents",
    ),
    (
        rules.middles_are_of_text,
        (*TOKENIZER, "data.source=packed", "data.files=a", "data.fill_in_middle=0.5"),
        "data.fill_in_middle cuts text, and data.source packed has tokens; got 0.5; "
        "fix: set it to 0, or train on the text itself",
    ),
    (
        rules.middles_have_tokens,
        ("data.fill_in_middle=0.5",),
        "data.fill_in_middle needs tokens before prefix, suffix and middle, which data.tokenizer bytes does not have; "
        "fix: set it to 0, or set data.tokenizer to a tokenizer.json",
    ),
    (
        rules.middles_have_three_tokens,
        (*TOKENIZER, 'data.fill_in_middle_tokens=["<pre>", "<suf>", "<pre>"]'),
        "data.fill_in_middle_tokens must be three different names, of the tokens before prefix, suffix and middle; "
        "got <pre>, <suf>, <pre>",
    ),
]

FINE = {
    "text files": TEXT,
    "files held out": (*TEXT, "data.validation_files=b.txt", "data.validation_share=0.0"),
    "no evaluation": (*TEXT, "data.validation_share=0.0", "evaluation.rows=0"),
    "synthetic text needs no share": ("data.source=synthetic-random", "data.validation_share=0.0"),
    "a tiny vocabulary for synthetic text": ("data.source=synthetic-learnable", "model.vocab_size=5"),
    "a tokenizer file": ("data.tokenizer=t.json", "data.end_of_document=</s>", "model.vocab_size=64"),
    "the id that ends packed tokens": ("data.source=packed", "data.files=a.bin", "data.end_of_document=50256"),
    "a mixture": (*WEB, *CODE),
    "a mixture with files held out": (
        *WEB,
        *CODE,
        "data.mixture.web.validation_files=b.jsonl",
        "data.validation_share=0.0",
    ),
    "a part in tokens": (*WEB, *CODE, "data.mixture.code.source=packed"),
    "a dataset": (*C4, "data.streaming=true", "data.revision=main"),
    "a dataset with a split held out": (*C4, "data.validation_split=validation", "data.validation_share=0.0"),
    "middles": (*TEXT, *TOKENIZER, "data.fill_in_middle=0.5", 'data.fill_in_middle_tokens=["<p>", "<s>", "<m>"]'),
}
