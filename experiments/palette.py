"""One look for each layer in every figure: a colour, a mark and a line, so that none is told by its colour alone.

The colours are Okabe and Ito's, which readers who do not see red and green tell apart, and one more of their kind.
"""

from __future__ import annotations

from dataclasses import dataclass

VERMILION, BLUE, GREEN, PINK = "#D55E00", "#0072B2", "#009E73", "#CC79A7"
ORANGE, SKY, VIOLET, BROWN = "#E69F00", "#56B4E9", "#5B3A8C", "#7A5C1E"
INK, GREY, FAINT = "#333333", "#8A8A8A", "#D5D9E0"


@dataclass(frozen=True)
class Look:
    colour: str
    marker: str
    line: str | tuple = "-"

    @property
    def style(self) -> dict[str, object]:
        """For matplotlib's plot."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


GKA = Look(VERMILION, "D")
LOOKS = {
    "attention": Look(INK, "o", "--"),
    "linear": Look(GREY, "."),
    "mamba2": Look(ORANGE, "^"),
    "mamba2-narrow": Look(ORANGE, ">", ":"),
    "mamba": Look(BROWN, "*"),  # MambaVision's
    "gla": Look(GREEN, "P"),
    "deltanet": Look(SKY, "v"),
    "gdn": Look(BLUE, "s"),
    "gdn-narrow": Look(BLUE, "<", ":"),
    "kda": Look(PINK, "X"),
    "mesanet": Look(VIOLET, "p"),
    "gka": GKA,
    "gka-plain": Look(VERMILION, "d", (0, (4, 1))),
    "gka-paper": Look(VERMILION, "d", (0, (4, 1))),
    "gka-no-beta": Look(VERMILION, "d", (0, (4, 1))),
}

# As `gka bench layer` names them.
TITLES = {
    "softmax attention": "attention", "linear attention": "linear", "Mamba2": "mamba2", "DeltaNet": "deltanet",
    "gated linear attention": "gla", "Gated DeltaNet": "gdn", "Kimi Delta Attention": "kda", "MesaNet": "mesanet",
    "Gated KalmaNet": "gka",
}  # fmt: skip

# For what is no layer: variants of one, solvers, directions. GKA's own colour is not among them.
OTHERS = (
    Look(BLUE, "s"), Look(GREEN, "P"), Look(PINK, "X"), Look(ORANGE, "^"), Look(SKY, "v"), Look(VIOLET, "p"),
    Look(BROWN, "*"), Look(GREY, "o"),
)  # fmt: skip
