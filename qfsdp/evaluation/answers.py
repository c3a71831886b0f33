"""The number that a worked answer ends in, as GSM8K and Orca-Math compare answers.

Exact: numbers are `Fraction`s, so 0.1 is one tenth, and 3.33 is not 10/3. What is ambiguous is
decided so:

* 1,000 and 1,000,000.5 and 12,34,567 have thousands separators; 1,5 and 1,00 a decimal comma (one
  comma, one or two digits); 1,2,3 and 1,2345 are several numbers.
* 1.000 is one; 1.000.000 a million (two points cannot be decimal), and 1.000,50 a thousand and a
  half. A plain space groups nothing: "5 100 dollar bills".
* A unit, a currency and a percent sign are left out: 25% is 25, as GSM8K's answers mean it.
* "million" and the like multiply; "k", "dozen" and numbers spelled out mean nothing.
* 10-5 ends in 5 and " -5" is negative: a sign touches its number and nothing before it.
"""

from __future__ import annotations

import re
from fractions import Fraction

_INTEGER = r"\d{1,3}(?:,\d{3})+(?!,?\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!,?\d)"
_PLAIN = rf"(?:{_INTEGER}|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?P<sign> (?<![\w)\]}}%.]) [-+] )?
    (?: \\? [$€£¥₹] )?
    (?P<inner_sign> (?<= [$€£¥₹] ) - )?
    (?<! \w ) (?<! \d\. )
    (?:
        (?: (?P<latex_whole> \d+ ) \s* )?
        \\ [dt]? frac \s* \{{ \s* (?P<latex_top> -?[\d.,]+ ) \s* \}}
        \s* \{{ \s* (?P<latex_bottom> [\d.,]+ ) \s* \}}
    |
        (?: (?P<whole> \d+ ) \s+ )?
        (?P<top> {_PLAIN} ) \s* / \s* (?P<bottom> {_PLAIN} ) (?! \s* [/\d] )
    |
        (?: (?P<points> \d{{1,3}} (?: \.\d{{3}} ){{2,}} (?: ,\d{{1,2}} )? (?! [.,]?\d )
            | \d{{1,3}} (?: \.\d{{3}} )+ ,\d{{1,2}} (?! [.,]?\d ) )
          | (?P<comma> (?<! \d, ) \d+ ,\d{{1,2}} (?! [.,]?\d ) )
          | (?P<plain> {_PLAIN} )
        )
        (?: [eE] (?P<e> [-+]?\d{{1,3}} ) (?! \d )
          | \s* (?: [x*×] | \\times | \\cdot ) \s* 10 \s* (?: \^ | \*\* )
            \s* \{{? (?P<power> [-+]?\d{{1,3}} ) (?! \d ) \}}?
        )?
        (?: \s+ (?P<word> thousand | million | billion | trillion ) \b )?
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_WORDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
_MINUS = str.maketrans({"−": "-", "–": "-", "‒": "-", "⁄": "/"})
_GROUPING = re.compile(r"(?<=\d)(?:\{,\}|\\[,;! ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_FINAL = re.compile(r"####(?!#)[^\S\n]*(.*)")
_LISTED = re.compile(r"\W*\d+[.)]\s+\S")  # "#### 1. Add them up" is a heading
_STATED = re.compile(
    r"\banswer[\s*_]*(?P<verb>is|was|equals|(?:would|should|will|must) be|[:=])", re.IGNORECASE
)


def parse_answer(text: str) -> Fraction | None:
    """The number that `text` gives as its answer; None where there is none.

    Looked for in this order: after the first `####`, in the last `\\boxed{}`, after the last "the
    answer is" or "answer:", in the last bold that is a number and nothing else; then the last
    number of all. Of an equation the number behind the last `=` counts. A box without a number is
    an answer that is none.
    """
    text = _plain(text)
    for match in _FINAL.finditer(text):
        if _starts_with_number(match[1]) and not _LISTED.match(match[1]):
            return _stated(match[1])
    box = text.rfind("\\boxed")
    if box >= 0:
        return _stated(_braced(text[box + len("\\boxed") :]))
    for match in reversed(list(_STATED.finditer(text))):
        sentence = re.split(r"\.(?:\s|$)|\n", text[match.end() :].lstrip(" \n:*_"))[0]
        direct = _starts_with_number(sentence)
        # "Answer:" alone may stand above the whole calculation.
        if match["verb"] in ":=" and (not direct or "=" in sentence):
            continue
        found = _stated(sentence)
        if found is not None:
            return found
    bold = [found for found in re.findall(r"\*\*([^*\n]+)\*\*", text) if _is_number(found)]
    numbers = _numbers(bold[-1] if bold else text)
    return numbers[-1] if numbers else None


def same_answer(a: Fraction | None, b: Fraction | None) -> bool:
    """Whether both are the same number; no answer is never right, not even twice."""
    return a is not None and a == b


def _plain(text: str) -> str:
    """One minus sign, no thousands separators but commas and points, fractions written out."""
    text = _GROUPING.sub("", text.translate(_MINUS))
    for sign, written in _VULGAR.items():
        text = text.replace(sign, f" {written}")
    text = re.sub(r"(\\[dt]?frac)\s*(\d)\s*(\d)", r"\1{\2}{\3}", text)  # \frac34
    return re.sub(r"=\s*-\s+(?=[\d$.])", "= -", text)


def _braced(text: str) -> str:
    """What stands in the braces that `text` begins with; all of it where they are not closed."""
    depth = 0
    for at, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth <= 0:
            return text[1:at] if at else text.split("\n")[0]
    return text[1:]


def _stated(sentence: str) -> Fraction | None:
    """The number that a sentence states: behind the last `=`, else the one that it begins with,
    else the last one."""
    for part in (sentence.rpartition("=")[2], sentence):
        if numbers := _numbers(part):
            return numbers[0 if _starts_with_number(part) else -1]
    return None


def _starts_with_number(text: str) -> bool:
    """Whether nothing but marks comes before the first number: brackets, bold, a currency."""
    match = _NUMBER.search(text)
    return match is not None and not re.search(r"[^\W_]", text[: match.start()])


def _is_number(text: str) -> bool:
    text = text.strip(" .%")
    match = _NUMBER.match(text)
    return match is not None and match.end() == len(text)


def _numbers(text: str) -> list[Fraction]:
    return [number for match in _NUMBER.finditer(text) for number in _values(match)]


def _values(match: re.Match[str]) -> list[Fraction]:
    """The numbers of one match: none if it divides by zero, two of "10 20/5"."""
    if (top := match["top"] or match["latex_top"]) is not None:
        whole = match["whole"] or match["latex_whole"]
        bottom = _read(match["bottom"] or match["latex_bottom"])
        if not bottom:
            return []
        part = _read(top) / bottom
        mixed = whole is not None and 0 <= part < 1
        values = [_read(whole) + part] if mixed else [part]
        if whole is not None and not mixed:
            values.insert(0, _read(whole))
    elif match["points"]:
        values = [_read(match["points"].replace(".", "").replace(",", "."))]
    elif match["comma"]:
        values = [_read(match["comma"].replace(",", "."))]
    else:
        values = [_read(match["plain"])]
    values[-1] *= Fraction(10) ** int(match["e"] or match["power"] or 0)
    values[-1] *= _WORDS.get((match["word"] or "").lower(), 1)
    if match["sign"] == "-" or match["inner_sign"]:
        values[0] = -values[0]
    return values


def _read(digits: str) -> Fraction:
    """A number of digits, one point and separating commas; 0 where it is none ("." or "1.2.3")."""
    try:
        return Fraction(digits.replace(",", "").rstrip("."))
    except ValueError:
        return Fraction(0)
