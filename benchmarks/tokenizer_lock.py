"""How long other threads wait while one encodes text: `encode` holds Python's lock, `encode_batch_fast` does not.

    python -m benchmarks.tokenizer_lock --tokenizer tokenizer.json --output benchmarks/results/tokenizer-lock.json

The thread that feeds a GPU is such another thread. Here it sleeps for 0.2 ms again and again, and what it sleeps longer
is what it would have waited before its next launch. Text is the standard library, document by document.
"""

import argparse
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks import record
from benchmarks.layouts import make_tokenizer

NAP_SECONDS = 0.0002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=Path("tokenizer.json"), help="made there if it is missing")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each way")
    record.add_arguments(parser)
    options = parser.parse_args()
    if not options.tokenizer.exists():
        make_tokenizer(options.tokenizer)
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(errors="ignore") for file in files]
    ways: dict[str, Callable[[str], int]] = {
        "encode": lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        "encode_batch_fast": lambda text: len(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids),
    }
    rows = {name: measure(encode, texts, options.seconds) for name, encode in ways.items()}
    for name, row in rows.items():
        print(f"{name:<20}" + "  ".join(f"{key} {value:,.3f}" for key, value in row.items()), flush=True)
    record.write(options, rows, documents=len(texts))


def measure(encode: Callable[[str], int], texts: list[str], seconds: float) -> dict[str, Any]:
    """Waits of this thread, in milliseconds, while another one encodes; and that one's tokens a second."""
    end, tokens = time.perf_counter() + seconds, [0]

    def work() -> None:
        while True:
            for text in texts:
                tokens[0] += encode(text)
                if time.perf_counter() > end:
                    return

    thread = threading.Thread(target=work)
    thread.start()
    waits = []
    while thread.is_alive():
        begin = time.perf_counter()
        time.sleep(NAP_SECONDS)
        waits.append((time.perf_counter() - begin - NAP_SECONDS) * 1e3)
    median, p99 = np.percentile(waits, [50, 99])
    return {
        "wait_ms_median": float(median),
        "wait_ms_p99": float(p99),
        "wait_ms_highest": max(waits),
        "tokens_per_second": tokens[0] / seconds,
    }


if __name__ == "__main__":
    main()
