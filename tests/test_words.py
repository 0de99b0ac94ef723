"""The words that docs/glossary.md lists as retired are not used in identifiers, comments, messages or pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "benchmarks", "decoder", "deploy", "docs", "encoder", "examples", "families", "kernels", "protos", "saccade",
    "service", "tests",
)  # fmt: skip
SUFFIXES = {".cpp", ".h", ".js", ".md", ".proto", ".py", ".sh", ".toml", ".yaml"}
EXEMPT = {
    "docs/glossary.md", "docs/log.md", "tests/test_words.py", "tests/demo/test_data.py",
    "tests/demo/test_requests.py",
}  # fmt: skip

# A retired word of the glossary -> its forms in text and in identifiers.
FORMS = {
    "picture": r"pictures?",
    "seat": r"seats?",
    "fronts": r"fronts",
    "under way": r"under[ _-]?way",
    "puts out": r"put(?:s|ting)?[ _]out",
    "throws out": r"thr(?:ow|ows|ew|own)[ _]out",
    "gives way": r"g(?:ive|ives|ave|iven|iving)[ _]way",
    "whoever": r"whoever",
    "passed over": r"passed[ _]over",
}
# A word of the glossary's second table -> the forms that it has in its former meaning.
FORMER_MEANINGS = {
    "turn (of the encoder)": r"encod(?:er|ing)[ ._-]turns?|encoder's turns?|turns? of the encoder|turn_seconds",
    "floor, least time": r"least time|of the least|least, us",
    "rest (of drafting)": r"drafting rests|rests? of drafting",
    "read (of a prompt)": r"prompts? (?:is|are|was|were) read",
    "refused (of a draft)": r"refused drafts?|drafts? (?:is|are|was|were) refused|refuses drafts?",
    "given back (of memory)": r"g(?:ive|ives|iven|ave) back",
    "room (of `service/`)": r"rooms",
}
# The demo's questions and files, and the former name of an option.
QUOTED = re.compile(
    r"demo/pictures|\"demo\" / \"pictures\"|example\.pictures|the picture(?: show)?\?|\"--fronts\"", re.IGNORECASE
)


def glossary(table: int) -> list[str]:
    """The words of a table of the glossary: 0 is of retired words, 1 of those that have kept an ordinary meaning."""
    section = (
        (CHECKOUT / "docs" / "glossary.md").read_text().split("## Retired words")[1].split("These have kept")[table]
    )
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][2:]


ANY = "|".join((*FORMS.values(), *FORMER_MEANINGS.values()))
BOUNDED = re.compile(rf"(?<![a-z])(?:{ANY})(?![a-z])", re.IGNORECASE)
WITHIN = re.compile(ANY)
"""A retired word in lower case, also within another word: searching for this is many times as fast."""


def found(text: str) -> Iterator[tuple[int, str]]:
    """(line, retired word) of a text. A word is bounded by anything but letters, so `in_picture_now` holds one."""
    if not WITHIN.search(QUOTED.sub("", text).lower()):
        return
    for number, line in enumerate(text.splitlines(), 1):
        for match in BOUNDED.finditer(QUOTED.sub("", line)):
            yield number, match[0]


def test_the_glossary_lists_what_is_checked() -> None:
    assert glossary(0) == list(FORMS)
    assert glossary(1) == list(FORMER_MEANINGS)


def test_retired_words_are_found_in_identifiers_and_sentences() -> None:
    for line in ("NO_PICTURE_WORKER", "under_way_now = 1", "a seat's ring", "it gives way.", "def picture(seed):",
        "--encoder-turn", "encoding.turn()", "turn_seconds=0.1", "the prompt was read twice",
        "memory that is given back", "the rooms of service/", "is passed_over", "of the least",
    ):  # fmt: skip
        assert list(found(line)), line
    for line in ("a pictured thing", "demo/pictures/a.png", 'ask("What does the picture show?")', "in front of it",
        "it is its turn", "room for more", "bytes are read", "a call is refused",
    ):  # fmt: skip
        assert not list(found(line)), line


def test_no_retired_word_is_used() -> None:
    problems = [
        f"{path.relative_to(CHECKOUT)}:{number}: {word!r}; docs/glossary.md says what it is called now"
        for folder in FOLDERS
        for path in sorted((CHECKOUT / folder).rglob("*"))
        if path.suffix in SUFFIXES
        and path.relative_to(CHECKOUT).as_posix() not in EXEMPT
        and path.parent != CHECKOUT / "docs" / "log"
        for number, word in found(path.read_text(errors="replace"))
    ]
    assert not problems, "\n".join(problems)
