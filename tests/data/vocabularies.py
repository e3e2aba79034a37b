"""Small vocabularies of every kind, made on the spot; and text that is hard for tokenizers."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = ["the penstock feeds the turbine, the turbine feeds the town"] * 4

HARD_TEXTS = (
    "",
    " ",
    "   ",
    "  lead and trail  ",
    "\r\n\t x\n\n\n",
    "\x00a\x00",
    "\ufeffa \u200b\u200d",
    "\u00e9\u4e16\U0001f600 e\u0301\u0301",
    "\ufb01\u00bd\uff21\u2460 \u3000 a",
    "<0x41> <unk> <s> </s> <|endoftext|> <|fim_prefix|> <|end_of_text|> <|begin_of_text|>",
    "it's IT'S they'LL \u017f's 1234567 3.14",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0627\u0644\u0639 \u0e01\u0e33",
    "\ud7ff\ue000\uffff\U0010ffff",
    " " * 50 + "x" * 300 + "\n" * 50,
)


def json_file(path: Path, *, special: Sequence[str] = ("<|endoftext|>",), strip: bool = False) -> Path:
    """Write a `tokenizer.json`: byte-level, with a truncation that must not be obeyed."""
    tokenizer = Tokenizer(models.BPE())
    if strip:
        tokenizer.normalizer = normalizers.Strip()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,  # 256 bytes, the special tokens, and some merges
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.enable_truncation(3)  # stored in the file
    tokenizer.save(str(path))
    return path


def sentencepiece_model(path: Path, *, lossless: bool = True, end: bool = True) -> Path:
    """Write a `.model`, either as of Llama 2, where every text comes back, or as of T5, with NFKC and unknowns."""
    kept = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=300 if lossless else 40,  # with byte fallback there are 256 pieces for bytes
        user_defined_symbols=["<tool>"],
        eos_id=2 if end else -1,
        minloglevel=2,
        **(kept if lossless else {}),
    )
    path.write_bytes(model.getvalue())
    return path


MERGED = ("th", "the", " the", "tu", "ee", "\u00e9", "12", "  ")
RANKS = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *map(str.encode, MERGED)])}


def tiktoken_lines(ranks: dict[bytes, int]) -> str:
    """A vocabulary as tiktoken stores it."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


def tiktoken_file(path: Path) -> Path:
    """Write a `.tiktoken`: all bytes and a few merges."""
    path.write_text(tiktoken_lines(RANKS))
    return path
