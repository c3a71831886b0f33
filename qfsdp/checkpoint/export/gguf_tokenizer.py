"""The tokenizer of a model folder as metadata of a GGUF file.

llama.cpp has its own tokenizers. The file tells it the tokens, their types, the merges (byte-level
BPE) or scores (SentencePiece), and the name of the rule that cuts text into words. llama.cpp knows
that rule by name only, so a tokenizer with any other rule is refused: it would cut text in another
way than training did, without an error.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfsdp.checkpoint.saved_template import TEMPLATE_FILE, chat_tokenizer
from qfsdp.common.errors import UserError
from qfsdp.common.terminal import warn
from qfsdp.data.tokenizer_folder import TokenizerFolder, read_json, read_text

if TYPE_CHECKING:
    import gguf

BYTE_LEVEL_BPE, SENTENCE_PIECE = "gpt2", "llama"  # llama.cpp's names of the two kinds
# llama.cpp's types of tokens; SentencePiece has the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
SPACE = "\u2581"  # what SentencePiece writes for a space
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")  # which a file names
ADDED_SCORE = -1000.0  # of tokens that no merge makes

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PLAIN = "ByteLevel"  # with the pattern of GPT-2
PRE_TOKENIZERS: dict[tuple[str, ...], tuple[str, bool]] = {
    (f"{_WORDS}|\\p{{N}}{{1,3}}{_REST}",): ("llama-bpe", True),
    (f"{_WORDS}|\\p{{N}}{_REST}",): ("qwen2", False),
    (_MARKS,): ("qwen35", False),
    (_TEKKEN,): ("tekken", True),
    ("Digits", _PLAIN): ("smollm", False),
    (_PLAIN,): ("gpt-2", False),
}
"""How text is cut into words -> llama.cpp's name, and whether a word that is a token is kept whole
(`ignore_merges`)."""


@dataclass(frozen=True)
class Given:
    """What a tokenizer adds to its vocabulary, and to a text.

    Fields:
        added: id of an added token -> its text, and whether it is special.
        named: bos, eos, ... -> id.
        bos: whether bos is put before a text.
        spaces: whether a space is put before a text, and after a special token.
    """

    added: dict[int, tuple[str, bool]]
    named: dict[str, int]
    bos: bool
    spaces: tuple[bool, bool]


@dataclass(frozen=True)
class GgufTokenizer:
    """Fields:
    folder: of its files.
    kind: "gpt2" (byte-level BPE) or "llama" (SentencePiece).
    pre_tokenizer: llama.cpp's name of the rule that cuts text into words.
    tokens, scores, types: one for each row of the embeddings; `scores` of SentencePiece only.
    given: what training added to the vocabulary and to a text.
    """

    folder: Path
    kind: str
    pre_tokenizer: str
    tokens: list[str]
    scores: list[float]
    types: list[int]
    given: Given

    def warn_of_words(self, template: dict[str, str]) -> None:
        """Says on standard error where llama.cpp's rules are not quite those of training. It knows
        no combining marks, puts a space before a text and after special tokens, or nowhere, and bos
        before a chat too.

        Args:
            template: as in `add_to`.
        """
        if self.pre_tokenizer == "tekken":
            warn(
                "llama.cpp cuts some words into other tokens than training did: those with "
                "combining marks, as in Hindi"
            )
        if len(set(self.given.spaces)) > 1:
            warn(
                "training put a space before a text, but not after special tokens; llama.cpp does "
                "neither if the model has a chat template, and else both"
            )
        tokenizer = chat_tokenizer(template, self.folder) if self.given.bos else None
        try:
            chat = tokenizer and tokenizer.encode_chat([{"role": "user", "content": "a"}])
        except UserError:
            return  # its chats begin in another way
        if chat and chat[0] != self.given.named["bos"]:
            warn(
                "the chat template has no bos, and llama.cpp puts one before a chat as before any "
                "text; for chats: --override-kv tokenizer.ggml.add_bos_token=bool:false"
            )

    def add_to(self, writer: gguf.GGUFWriter, folder: Path, template: dict[str, str]) -> None:
        """Adds the tokenizer, its special tokens and the chat template to a file's metadata.

        Args:
            folder: of the model, whose config names tokens that the tokenizer's files do not.
            template: of the adapter, as `saved_template.read_template` returns it.
        """
        import gguf

        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(self.tokens)
        if self.scores:
            writer.add_token_scores(self.scores)
        writer.add_token_types(self.types)
        count, merges = len(self.tokens), self.kind == BYTE_LEVEL_BPE
        special = gguf.SpecialVocab(self.folder, merges, special_token_types=(), n_vocab=count)
        config = read_json(folder / "config.json")
        text = config.get("text_config") or {}
        config = text | {key: value for key, value in config.items() if value is not None}
        ids = {name: config.get(f"{name}_token_id") for name in SPECIAL} | self.given.named
        # Some configs have -1 for none, or one of a larger vocabulary.
        known = {n: i for n, i in ids.items() if isinstance(i, int) and 0 <= i < count}
        special.special_token_ids = known
        # Without the first, llama.cpp decides by `pre_tokenizer`. With the second, it would end
        # every question with eos.
        special.add_special_token = {"bos": self.given.bos, "eos": False}
        tokenizer = chat_tokenizer(template, self.folder)
        writer.add_add_space_prefix(self.given.spaces[tokenizer is not None])
        if (own := self.folder / TEMPLATE_FILE).is_file():  # before that of tokenizer_config.json
            special.chat_template = read_text(own)
        special.chat_template = template.get(TEMPLATE_FILE, special.chat_template)
        # llama.cpp finds the ends of well-known templates by their text, others by this key.
        if tokenizer is not None and tokenizer.end_of_turn_id is not None:
            special.special_token_ids["eot"] = tokenizer.end_of_turn_id
        special.add_to_gguf(writer, quiet=True)


def read_gguf_tokenizer(folder: Path, rows: int, pieces: Path | None = None) -> GgufTokenizer:
    """The tokenizer of a model folder.

    Args:
        rows: of the embeddings; those without a token get an unused one.
        pieces: the folder of `tokenizer.model`; None: the same.

    Raises:
        UserError: there is no tokenizer, or one that llama.cpp does not have.
    """
    file, model = folder / "tokenizer.json", (pieces or folder) / "tokenizer.model"
    described = read_json(file) if file.is_file() else {}
    if (described.get("decoder") or {}).get("type") == _PLAIN:
        name = _pre_tokenizer(file, described)
        found = {i: (token, 0.0, NORMAL) for token, i in described["model"]["vocab"].items()}
        kind, prefix = BYTE_LEVEL_BPE, False
    elif model.is_file():
        found, prefix = _sentence_pieces(model)
        name, kind = "default", SENTENCE_PIECE
    elif _is_of_sentence_piece(described):
        found, prefix = _pieces_of_merges(described["model"]), True
        name, kind = "default", SENTENCE_PIECE
    else:
        raise UserError(
            f"{folder}: no tokenizer that llama.cpp has; expected a tokenizer.json with byte-level "
            "BPE, or SentencePiece's BPE in a tokenizer.model or in a tokenizer.json"
        )
    given = _given(folder, described, kind == SENTENCE_PIECE, prefix)
    for index, (text, special) in given.added.items():
        if special and index >= rows:
            continue  # Gemma 3 of 1B has one of the larger models, for pictures
        # Of a word that is added, SentencePiece's score and kind count no longer.
        known = found.get(index)
        if known is None or known[0] != text or known[2] in (NORMAL, USER_DEFINED):
            found[index] = (text, ADDED_SCORE, CONTROL if special else USER_DEFINED)
    if (last := max(found)) >= rows:
        raise UserError(
            f"{folder}: the tokenizer has token {last}, the embeddings {rows} rows; expected a row "
            "for every token"
        )
    all_tokens = [found.get(i, (f"[PAD{i}]", ADDED_SCORE, UNUSED)) for i in range(rows)]
    tokens, scores, types = map(list, zip(*all_tokens, strict=True))
    if kind == BYTE_LEVEL_BPE:
        return GgufTokenizer(folder, kind, name, tokens, [], types, given)
    # llama.cpp finds and prints these letter by letter: Gemma has tokens of several spaces.
    for index, type in enumerate(types):
        if type == USER_DEFINED:
            tokens[index] = tokens[index].replace(SPACE, " ")
    return GgufTokenizer(folder, kind, name, tokens, scores, types, given)


def _given(folder: Path, described: dict[str, Any], bos: bool, space: bool) -> Given:
    """What training reads, or what a folder says that training cannot read.

    Args:
        described: `tokenizer.json`, or nothing.
        bos, space: what a tokenizer of its kind does.
    """
    settings = folder / "tokenizer_config.json"
    if not described or not settings.is_file():
        more = read_json(settings) if settings.is_file() else {}
        entries = {int(i): entry for i, entry in more.get("added_tokens_decoder", {}).items()}
        entries |= {entry["id"]: entry for entry in described.get("added_tokens", [])}
        added = {i: (e["content"], bool(e.get("special"))) for i, e in entries.items()}
        return Given(added, {}, bool(more.get("add_bos_token", bos)), (space, space))
    files = TokenizerFolder(str(folder))
    backend = files.backend()
    added = {i: (t.content, t.special) for i, t in backend.get_added_tokens_decoder().items()}
    ids = {name: backend.token_to_id(text) for name, text in files.token_names().items()}
    named = {name.removesuffix("_token"): i for name, i in ids.items() if i is not None}
    named = {name: named[name] for name in SPECIAL if name in named}
    special, spaces = next((text for text, special in added.values() if special), ""), []
    for before in ("", special):
        tokens = backend.encode(f"{before}a", add_special_tokens=False).tokens
        spaces.append("".join(tokens).removeprefix(before).startswith(SPACE))
    adds_bos = backend.encode("a").ids[:1] == [named.get("bos")]
    return Given(added, named, adds_bos, (spaces[0], spaces[1]))


def _pre_tokenizer(file: Path, described: dict[str, Any]) -> str:
    """llama.cpp's name of the rule by which a byte-level BPE tokenizer cuts text into words."""
    section, model = described.get("pre_tokenizer") or {}, described.get("model") or {}
    steps = section.get("pretokenizers", [section])
    known = PRE_TOKENIZERS.get(tuple(filter(None, map(_step, steps))))
    normalizer = (described.get("normalizer") or {"type": "NFC"}).get("type")
    ignores = bool(model.get("ignore_merges"))
    if model.get("type") != "BPE" or normalizer != "NFC" or known is None or known[1] != ignores:
        names = ", ".join(name for name, _ in PRE_TOKENIZERS.values())
        raise UserError(
            f"{file}: cuts text into words as no tokenizer of llama.cpp is known to do; expected "
            f"the rules of {names}"
        )
    return known[0]


def _step(step: dict[str, Any]) -> str:
    """One step of a pre-tokenizer in a word: a pattern, or its type; "" if it cuts nothing."""
    if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex"))
    if step.get("type") == _PLAIN and not step.get("add_prefix_space"):
        return _PLAIN if step.get("use_regex", True) else ""
    if step.get("type") == "Digits" and step.get("individual_digits"):
        return "Digits"
    return f"unknown {step.get('type')}"


def _sentence_pieces(file: Path) -> tuple[dict[int, tuple[str, float, int]], bool]:
    """Token id -> text, score and type, of a SentencePiece model; whether it puts a space before a
    text."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    model = messages.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except (OSError, DecodeError):
        raise UserError(f"{file}: cannot be read; expected a model of SentencePiece") from None
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise UserError(f"{file}: is no BPE; expected one: llama.cpp cuts others in another way")
    found = {i: (one.piece, one.score, int(one.type)) for i, one in enumerate(model.pieces)}
    return found, bool(model.normalizer_spec.add_dummy_prefix)


def _is_of_sentence_piece(described: dict[str, Any]) -> bool:
    """Whether a `tokenizer.json` cuts text as SentencePiece's BPE does. transformers 5 writes no
    `tokenizer.model`.

    Spaces must be letters. llama.cpp merges the pair whose word has the highest score, `tokenizers`
    the pair that is listed first. So every pair that makes a word must be listed, and the pairs of
    a word must stand together.
    """
    model, steps = described.get("model") or {}, list[dict[str, Any]]()
    for part in ("normalizer", "pre_tokenizer"):
        section = described.get(part) or {}
        steps += section.get("normalizers", section.get("pretokenizers", [section]))
    steps = [step for step in steps if step]
    letters = [step for step in steps if SPACE in (step.get("content"), step.get("replacement"))]
    for step in steps:
        of_spaces = step.get("pattern") == {"String": " "} or step.get("prepend") == SPACE
        if not of_spaces and (step.get("type") != "Metaspace" or step.get("split", True)):
            return False
    if not letters:
        return False
    if model.get("type") != "BPE" or not model.get("byte_fallback") or model.get("ignore_merges"):
        return False
    vocab, merges = model["vocab"], [_pair(merge) for merge in model["merges"]]
    words = ["".join(pair) for pair in merges]
    if sum(a != b for a, b in pairwise(words)) + 1 != len(set(words)):  # of a word not together
        return False
    added, listed = {token["content"] for token in described["added_tokens"]}, set(merges)
    return all(
        pair in listed
        for word in vocab.keys() - added
        for pair in ((word[:at], word[at:]) for at in range(1, len(word)))
        if not BYTE_TOKEN.fullmatch(word)
        and all(part in vocab and part not in added for part in pair)
    )


def _pieces_of_merges(model: dict[str, Any]) -> dict[int, tuple[str, float, int]]:
    """The pieces of `_is_of_sentence_piece`, as `_sentence_pieces` returns them."""
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        scores.setdefault("".join(_pair(merge)), -float(rank))
    kinds = {model.get("unk_token"): UNKNOWN}
    return {
        index: (
            text,
            scores.get(text, 0.0),
            kinds.get(text, BYTE if BYTE_TOKEN.fullmatch(text) else NORMAL),
        )
        for text, index in model["vocab"].items()
    }


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """The two parts of an entry of `merges`, which older files write as one text."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second
