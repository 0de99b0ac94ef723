"""Keys of the prefix cache: a hash of a sequence's first tokens, of their positions and of the images among them.

The key of a page hashes the key of the page before it, so equal keys mean equal prefixes. The first key is the hash of
the request's salt: requests with different salts share nothing.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from hashlib import blake2b
from operator import attrgetter

from decoder.sequence import Sequence

KEY_BYTES = 16


def key_at(sequence: Sequence, tokens: int, page: int) -> bytes:
    """Key of the sequence's first `tokens` tokens, in pages of `page` tokens. All of these tokens must be known."""
    assert tokens <= sequence.known, f"{tokens} tokens are to be looked up, but only {sequence.known} are known"
    chain = sequence.lookup.chain
    if not chain:
        chain.append(blake2b(sequence.request.salt, digest_size=KEY_BYTES).digest())
    while len(chain) <= tokens // page:
        begin = (len(chain) - 1) * page
        chain.append(_digest(chain[-1], sequence, begin, begin + page))
    whole = tokens // page * page
    return chain[tokens // page] if whole == tokens else _digest(chain[tokens // page], sequence, whole, tokens)


def share_keys(leader: Sequence, follower: Sequence) -> None:
    """Copies the keys of `leader` to `follower`; both have the same tokens so far."""
    follower.lookup.chain = list(leader.lookup.chain)


def _digest(parent: bytes, sequence: Sequence, begin: int, end: int) -> bytes:
    """Hash of tokens `[begin, end)` after the prefix with the key `parent`. Rows of an image are hashed by the image's
    content key, and positions only if they differ from the tokens' indices.
    """
    state, positions = blake2b(parent, digest_size=KEY_BYTES), sequence.request.positions
    state.update(struct.pack("<q", end - begin))
    state.update(array("q", sequence.tokens[begin:end]).tobytes())
    if positions is not None and (numbers := positions.uncounted(begin, end)):
        state.update(array("q", [-1, len(numbers), *numbers]).tobytes())  # what follows never begins with -1
    spans = sequence.request.spans
    for index in range(bisect_right(spans, begin, key=attrgetter("end")), len(spans)):
        span = spans[index]
        first, last = max(begin, span.start), min(end, span.end)
        if first >= last:
            break
        state.update(struct.pack("<qqqq", first - begin, first - span.start, last - span.start, len(span.key)))
        state.update(span.key)
    return state.digest()
