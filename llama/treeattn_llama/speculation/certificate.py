"""What a step of speculative decoding promised, and what came of it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Of one step, the tokens of all texts together and its seconds, drafting included.

    expected: new tokens: one for each text that is not over, and the chance of each node that was
              verified, as far as its draft is to be trusted (`Budget`). No other tree of so many
              nodes, of what was proposed, has more: a path is no more probable than its beginning,
              so the most probable nodes form a tree; and what is expected of a tree is the sum of
              its nodes' chances, since each accepted node is one token
    planned:  seconds that a step of this size took lately, and that drafting took now; None where
              no such step was measured, and for drawn candidates, which promise nothing
    plain:    seconds of a step without candidates, which would have given each text one token; None
              where there was none
    tokens, seconds: what came of it. A text's end may have cut off some
    """

    expected: float
    planned: float | None
    plain: float | None
    tokens: int
    seconds: float

    @property
    def promised(self) -> float | None:
        """Tokens a second that were expected."""
        return None if self.planned is None else self.expected / self.planned

    @property
    def kept(self) -> float:
        """Tokens a second that came."""
        return self.tokens / self.seconds
