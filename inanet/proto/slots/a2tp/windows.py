"""A2TP's two windows: equations 1 to 6 of the paper, as numbers in and numbers out.

ACW bounds the fragments that use the switch's slots, LCW those that are in flight; ACW is part of LCW. Once per LCW of answers
(about a round trip; window updates):

- (1) ``alpha <- (1 - w) alpha + w h``, *h* the share of the fragments within ACW that were marked Col;
- (2) ``beta <- (1 - g) beta + g e``, *e* the share of those within LCW that were marked ECN (the paper prints an index too
  many: the old value is meant);
- (3) ``gamma``, the straggling degree, is measured (:mod:`inanet.proto.slots.a2tp.straggling`);
- ``p = (alpha - H) / (1 - H)``, at least 0; (5) ``d = p ** gamma``;
- (4) if ``p > 0``: ``ACW <- ACW (1 - d / 2)``, else one fragment more (section 4.4);
- (6) if anything was marked ECN: ``LCW <- LCW (1 - beta / 2)``, else one fragment more;
- ``ACW <- min(ACW, LCW)``.

The public program has other constants and a decrease of its own; :data:`ARTIFACT` follows it.

*Tenants.* Windows that grow by a *weight* instead of one fragment share slots in proportion to the weights, as additive
increase does; with ``straggling=False`` every job counts as one without stragglers (gamma is 1), which is plain fairness.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Constants of a variant of A2TP."""

    name: str
    #: weights of new samples in alpha and beta
    w: float
    g: float
    #: collisions below this share do not count as congestion
    threshold: float
    #: windows decrease as the public program has it: not without a Col mark in the last window, by another formula
    public: bool = False


PAPER = Profile("paper", w=1 / 16, g=1 / 16, threshold=0.15)
ARTIFACT = Profile("artifact", w=1 / 8, g=1 / 8, threshold=0.1, public=True)
PROFILES = {profile.name: profile for profile in (PAPER, ARTIFACT)}


def congestion_degree(alpha: float, threshold: float) -> float:
    """p: how far alpha is above the threshold, 0 to 1."""
    return max(0.0, (alpha - threshold) / (1.0 - threshold))


def decreasing_factor(p: float, gamma: float) -> float:
    """Equation 5; 0 without congestion, whatever gamma is."""
    return p**gamma if p > 0.0 else 0.0


class Windows:
    """ACW and LCW in fragments, from 1 to ``largest``; both begin with ``initial``."""

    def __init__(
        self,
        initial: int,
        largest: int,
        profile: Profile = PAPER,
        *,
        weight: float = 1.0,
        straggling: bool = True,
    ) -> None:
        if not 1 <= initial <= largest or weight <= 0.0:
            raise ValueError(
                f"windows of {initial} to {largest} fragments with weight {weight}: the first is at least 1 and at most"
                " the second, the weight positive"
            )
        self.profile = profile
        self.largest = float(largest)
        self.weight = weight
        self.straggling = straggling
        self.alpha = self.beta = 0.0
        self.acw = self.lcw = float(initial)

    def update(self, h: float, e: float, gamma: float) -> None:
        """A window has been answered: ``h`` and ``e`` are shares of marked fragments, ``gamma`` the straggling degree."""
        profile = self.profile
        self.alpha += profile.w * (h - self.alpha)
        self.beta += profile.g * (e - self.beta)
        if not self.straggling:
            gamma = 1.0
        factor = self._public(h, gamma) if profile.public else self._printed(gamma)
        self.acw = self.acw * factor if factor < 1.0 else self.acw + self.weight
        self.lcw = self.lcw * (1.0 - self.beta / 2.0) if e > 0.0 else self.lcw + 1.0
        self.lcw = min(max(self.lcw, 1.0), self.largest)
        self.acw = min(max(self.acw, 1.0), self.lcw)

    def _printed(self, gamma: float) -> float:
        p = congestion_degree(self.alpha, self.profile.threshold)
        return 1.0 - decreasing_factor(p, gamma) / 2.0

    def _public(self, h: float, gamma: float) -> float:
        over = self.alpha - self.profile.threshold
        if h == 0.0 or over <= 0.0:
            return 1.0
        return 1.0 - float(over**gamma) / (2.0 - self.profile.threshold)
