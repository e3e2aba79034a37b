"""What is drawn: scripts that listen, look and act in a browser, a reader of what they found, traces of a figure."""

import json
import re
from html import unescape
from typing import Any

from penstock.report.figure import Figure, channels
from penstock.report.page import open_in_browser

LISTENING = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
for (const level of ["error", "warn"]) console[level] = (...words) => errors.push(words.join(" "));
</script>"""
"""Stands before all other scripts and collects what they complain about."""

LOOKING = """<script>
(async () => {{
  while (!document.documentElement.dataset.drawn) await new Promise((wake) => setTimeout(wake, 20));
  const found = {{ errors }};
  {looking}
  document.documentElement.dataset.found = JSON.stringify(found);
}})();
</script>"""
"""Stands behind all other scripts and leaves in the document what it sees."""


def looked_at(browser: str, html: str, looking: str, *options: str) -> dict[str, Any]:
    """What a page has become in a browser."""
    script = LOOKING.format(looking=looking)
    prepared = html.replace("<body>", f"<body>{LISTENING}", 1).replace("</body>", f"{script}</body>", 1)
    drawn = open_in_browser(browser, prepared, "--window-size=1400,2000", *options)
    match = re.search(r'data-found="([^"]*)"', drawn)
    assert match is not None, re.findall(r'class="trouble">[^<]*', drawn) or drawn[:500]
    found: dict[str, Any] = json.loads(unescape(match[1]))
    return found


def shown(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def drawn(figure: Figure | None, name: str) -> dict[str, Any]:
    """The trace of a name in a figure."""
    return dict(next(trace for trace in shown(figure).data if trace.get("name") == name))


def contrast(one: str, other: str) -> float:
    """Of two colours, 1 to 21, as WCAG 2.2 has it."""

    def luminance(colour: str) -> float:
        shares = [value / 255 for value in channels(colour)]
        red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
