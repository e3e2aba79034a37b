"""The commands that documents show. Needs Python alone: tests/fresh_machine.py reads them before anything is there."""

import random
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'title="(?P<name>[\w.-]+)"')


@dataclass(frozen=True)
class Command:
    """One line of a `bash` block."""

    file: str
    line: str
    runs: bool

    @property
    def words(self) -> list[str]:
        """The line as a shell splits it, without comment, variables in front, and the folder of the program."""
        words = shlex.split(self.line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]  # a variable in front of the program
        return [Path(words[0]).name, *words[1:]] if words else []

    @property
    def starts_a_run(self) -> bool:
        """It trains a preset. A file of one's own, or another run, is not here to be read."""
        words = self.words
        is_new = not {"--resume", "--dry-run", "--from"} & {*words}
        return words[:2] == ["penstock", "train"] and is_new and ".toml" not in words[2]

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.words)}"


def commands_in(text: str, file: str = "") -> list[Command]:
    """Every command of a document, lines joined where a backslash continues them."""
    found = []
    for block in BLOCK.finditer(text):
        kind = block["kind"].split()
        if kind[:1] == ["bash"]:
            lines = block["body"].replace("\\\n", " ").splitlines()
            found += [Command(file, line, "run" in kind) for line in lines if line.split("#")[0].strip()]
    return found


def write_files(text: str, folder: Path) -> None:
    """Put the files that a document shows into a folder, and a book of 413 kB."""
    for block in BLOCK.finditer(text):
        if title := TITLE.search(block["kind"]):
            (folder / title["name"]).write_text(block["body"], encoding="utf-8")
    words = ("whale", "ship", "sea", "captain", "harpoon", "and", "the", "of", "white", "ran", "saw", "again")
    draw = random.Random(0)  # the same book every time
    lines = (" ".join(draw.choices(words, k=draw.randint(6, 12))).capitalize() + ".\n" for _ in range(9000))
    (folder / "book.txt").write_text("".join(lines)[:413_000], encoding="utf-8")
