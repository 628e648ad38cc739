"""The blocks of the documentation's pages, for the tests that run them."""
import pathlib
import re
from typing import NamedTuple, Optional

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])


class Block(NamedTuple):
    language: str
    code: str
    expected: Optional[str]  # the text block right below: what the code prints
    line: int  # of the page, where the code begins


def blocks(page):
    """The blocks of a page that name their language."""
    text = page.read_text()
    fence = r"^```(\w+)\n(.*?)^```$(?:\n^```text\n(.*?)^```$)?"
    found = [
        Block(match[1], match[2], match[3], text.count("\n", 0, match.start(2)))
        for match in re.finditer(fence, text, re.MULTILINE | re.DOTALL)
    ]
    if any(block.language == "text" for block in found):
        raise ValueError(f"{page}: a text block does not follow the code that prints it")
    return found


def commands(code):
    """The command lines of an sh block, without comments; lines that end in a backslash go on."""
    lines = code.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines if line.strip() and not line.startswith("#")]


def prose(page):
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
