r"""Finds the number that a worked answer ends in, for datasets such as GSM8K and Orca-Math.

Numbers are exact `Fraction`s: 0.1 is one tenth, and 3.33 is not 10/3. The rules:

* Separators: 1,000 and 1,000,000.5 and 12,34,567 have thousands separators. 1,5 and 1,00 have a
  decimal comma (one comma before one or two digits). 1,2,3 and 1,2345 are several numbers. 1.000 is
  one, 1.000.000 is a million, 1.000,50 is 1000.5. A space does not group digits.
* Units, currencies and percent signs are ignored: 25% is 25, as in GSM8K's answers.
* "thousand" to "trillion" multiply. "k", "dozen" and spelled-out numbers are ignored.
* A minus sign directly before a number counts unless a digit, letter or bracket precedes it: 10-5
  ends in 5.

math-verify and lm-eval's GSM8K filters read other numbers from many of the texts in
`tests/evaluation/test_answers.py`, so neither of them replaces this module.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_INTEGER = r"\d{1,3}(?:,\d{3})+(?!,?\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!,?\d)"
_DECIMAL = rf"(?:{_INTEGER}|\d+)(?:\.\d+)?|\.\d+"
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
        (?P<top> {_DECIMAL} ) \s* / \s* (?P<bottom> {_DECIMAL} ) (?! \s* [/\d] )
    |
        (?: (?P<points> \d{{1,3}} (?: \.\d{{3}} ){{2,}} (?: ,\d{{1,2}} )? (?! [.,]?\d )
            | \d{{1,3}} (?: \.\d{{3}} )+ ,\d{{1,2}} (?! [.,]?\d ) )
          | (?P<comma> (?<! \d, ) \d+ ,\d{{1,2}} (?! [.,]?\d ) )
          | (?P<decimal> {_DECIMAL} )
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
_SIGNS = str.maketrans({"−": "-", "–": "-", "‒": "-", "⁄": "/"})
_GROUPING = re.compile(r"(?<=\d)(?:\{,\}|\\[,;! ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_FINAL = re.compile(r"####(?!#)[^\S\n]*(.*)")
_LIST_ITEM = re.compile(r"\W*\d+[.)]\s+\S")  # "#### 1. Add them up" is a heading
_STATED = re.compile(
    r"\banswer[\s*_]*(?P<verb>is|was|equals|(?:would|should|will|must) be|[:=])", re.IGNORECASE
)


def parse_answer(text: str) -> Fraction | None:
    r"""The number that `text` gives as its answer, or None.

    Takes the first that exists of: the number after the first `####`, in the last `\boxed{}`, after
    the last "the answer is" or "answer:", in the last bold text that is only a number, the last
    number of the text. In an equation, the number after the last `=` counts. A box without a number
    gives None.
    """
    text = _normalize(text)
    for match in _FINAL.finditer(text):
        if _starts_with_number(match[1]) and not _LIST_ITEM.match(match[1]):
            return _stated_number(match[1])
    box = text.rfind("\\boxed")
    if box >= 0:
        return _stated_number(_in_braces(text[box + len("\\boxed") :]))
    for match in reversed(list(_STATED.finditer(text))):
        sentence = re.split(r"\.(?:\s|$)|\n", text[match.end() :].lstrip(" \n:*_"))[0]
        # "Answer:" may also stand above a calculation.
        heading = not _starts_with_number(sentence) or "=" in sentence
        if match["verb"] in ":=" and heading:
            continue
        number = _stated_number(sentence)
        if number is not None:
            return number
    bold = [part for part in re.findall(r"\*\*([^*\n]+)\*\*", text) if _is_number(part)]
    numbers = _numbers(bold[-1] if bold else text)
    return numbers[-1] if numbers else None


def same_answer(a: Fraction | None, b: Fraction | None) -> bool:
    """Whether both are the same number. None never equals anything."""
    return a is not None and a == b


def _normalize(text: str) -> str:
    """Writes minus signs as "-", fractions as a/b, and digits without spaces between them."""
    text = re.sub("[¼-¾⅐-⅞]", lambda sign: f" {unicodedata.normalize('NFKC', sign[0])}", text)
    text = _GROUPING.sub("", text.translate(_SIGNS))
    text = re.sub(r"(\\[dt]?frac)\s*(\d)\s*(\d)", r"\1{\2}{\3}", text)  # \frac34
    return re.sub(r"=\s*-\s+(?=[\d$.])", "= -", text)


def _in_braces(text: str) -> str:
    """The content of the braces that `text` begins with. All of `text` if they are not closed."""
    depth = 0
    for at, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth <= 0:
            return text[1:at] if at else text.split("\n")[0]
    return text[1:]


def _stated_number(sentence: str) -> Fraction | None:
    """The number after the last `=`; else the number that begins the sentence; else the last."""
    for part in (sentence.rpartition("=")[2], sentence):
        if numbers := _numbers(part):
            return numbers[0 if _starts_with_number(part) else -1]
    return None


def _starts_with_number(text: str) -> bool:
    """Whether only marks, such as brackets or a currency, come before the first number."""
    match = _NUMBER.search(text)
    return match is not None and not re.search(r"[^\W_]", text[: match.start()])


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text.strip(" .%")) is not None


def _numbers(text: str) -> list[Fraction]:
    return [number for match in _NUMBER.finditer(text) for number in _values(match)]


def _values(match: re.Match[str]) -> list[Fraction]:
    """The numbers of one match: one, none after a division by zero, two for "10 20/5"."""
    if (top := match["top"] or match["latex_top"]) is not None:
        whole = match["whole"] or match["latex_whole"]
        bottom = _to_fraction(match["bottom"] or match["latex_bottom"])
        if not bottom:
            return []
        values = [_to_fraction(top) / bottom]
        if whole is not None:
            mixed = 0 <= values[0] < 1  # 1 1/2 is one number
            values = [_to_fraction(whole) + values[0]] if mixed else [_to_fraction(whole), *values]
    elif match["points"]:
        values = [_to_fraction(match["points"].replace(".", "").replace(",", "."))]
    elif match["comma"]:
        values = [_to_fraction(match["comma"].replace(",", "."))]
    else:
        values = [_to_fraction(match["decimal"])]
    values[-1] *= Fraction(10) ** int(match["e"] or match["power"] or 0)
    values[-1] *= _WORDS.get((match["word"] or "").lower(), 1)
    if match["sign"] == "-" or match["inner_sign"]:
        values[0] = -values[0]
    return values


def _to_fraction(digits: str) -> Fraction:
    """Digits with separating commas and one point as a number. 0 for others, such as "1.2.3"."""
    try:
        return Fraction(digits.replace(",", "").rstrip("."))
    except ValueError:
        return Fraction(0)
