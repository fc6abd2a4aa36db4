"""Tokenizers by the book, in plain Python.

The patterns by which a text is cut are those that the models were published with; Python's `re`
runs them, with classes of characters from Python's own tables of Unicode.
"""

import itertools
import re
import sys
import unicodedata
from collections import Counter


def characters(initial: str) -> str:
    """The inside of a class for `re`: all characters of the Unicode categories L…, N… or P…."""
    points = (i for i in range(sys.maxunicode + 1) if unicodedata.category(chr(i))[0] == initial)
    runs = []
    for i in points:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in runs)


SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


def compiled(pattern: str) -> re.Pattern:
    """A pattern whose classes L, N, P and s stand between %."""
    for name, inside in (("s", SPACE), *((x, characters(x)) for x in "LNP")):
        pattern = pattern.replace(f"%{name}%", inside)
    return re.compile(pattern)


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[%L%]+| ?[%N%]+| ?[^%s%%L%%N%]+|[%s%]+(?![^%s%])|[%s%]+"
LLAMA_3 = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n%L%%N%]?[%L%]+|[%N%]{1,3}"
    r"| ?[^%s%%L%%N%]+[\r\n]*|[%s%]*[\r\n]+|[%s%]+(?![^%s%])|[%s%]+"
)
PATTERNS = {
    "gpt-2": [GPT_2],
    "smollm": ["[%N%]", GPT_2],
    "llama-bpe": [LLAMA_3],
    "default": [r"[%P%$+<=>^~|]+", GPT_2, "[%N%]+", "[0-9]{3}"],
}


def cut(text: str, patterns: list[re.Pattern]) -> list[str]:
    """The matches of the first pattern, and what lies between them, all cut by the next ones."""
    pieces = [text]
    for pattern in patterns:
        # re.split with a group gives what lies between the matches, and the matches.
        pieces = [x for piece in pieces for x in re.split(f"({pattern.pattern})", piece) if x]
    return pieces


def byte_characters() -> dict[int, str]:
    """GPT-2's: a character that can be seen for each byte."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in seen]
    return {b: chr(b) for b in seen} | {b: chr(256 + i) for i, b in enumerate(hidden)}


BYTES = byte_characters()


def as_bytes(text: str) -> str:
    return "".join(BYTES[b] for b in text.encode())


def learn_merges(words: list[str], n: int) -> list[tuple[str, str]]:
    """The n merges that pair encoding learns from the words, whose letters are its first parts."""
    counts, merges = Counter(tuple(word) for word in words), []
    for _ in range(n):
        pairs = Counter()
        for word, count in counts.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        joined = Counter()
        for word, count in counts.items():
            joined[tuple(join(word, merges[-1]))] += count
        counts = joined
    return merges


def join(word, pair: tuple[str, str]) -> list[str]:
    """The word with every such pair joined, from the left."""
    joined = []
    for part in word:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def byte_pairs(text, ids, merges, patterns, whole_words=False) -> list[int]:
    """Byte-level pairs: of each word, the pair that was learned first is joined, until none is."""
    ranks = {pair: i for i, pair in enumerate(merges)}
    found = []
    for word in cut(text, patterns):
        parts = list(as_bytes(word))
        if whole_words and "".join(parts) in ids:
            parts = ["".join(parts)]
        while known := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
            parts = join(parts, min(known, key=ranks.get))
        found += [ids[part] for part in parts if part in ids]  # bytes may be missing
    return found


def sentence_pieces(text, ids, scores) -> list[int]:
    """The two neighbours that join to the piece with the best score are joined, until none do.

    What is no piece then is its bytes.
    """
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = ((a + b, -i) for i, (a, b) in enumerate(itertools.pairwise(parts)))
        best = max(((scores[x], i) for x, i in joins if x in scores), default=None)
        if best is None:
            break
        i = -best[1]
        parts[i : i + 2] = ["".join(parts[i : i + 2])]
    as_ids = ([ids[x]] if x in ids else [ids[f"<0x{b:02X}>"] for b in x.encode()] for x in parts)
    return list(itertools.chain(*as_ids))


def around(text: str, added: dict[str, int], encode) -> list[int]:
    """The ids of the added tokens in a text, and of what lies between them by `encode`."""
    longest_first = sorted(map(re.escape, added), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(longest_first)})", text)
    return [i for x in pieces if x for i in ([added[x]] if x in added else encode(x))]
