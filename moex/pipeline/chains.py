"""A layer whose forward and backward pass run in different ticks: in one piece, or cut where rows travel to experts.

`both` runs the forward pass of one layer and the backward pass of another side by side: each of the four journeys of rows
stands beside a computation that doesn't need it. Barriers keep the four phases apart; without them XLA's scheduler starts
everything that is ready at once, and nothing is left to run beside the later journeys (Megatron-Core's order, arXiv
2603.07685, section on overlap).
"""

import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax

from mesh import Fold
from moex.dispatch import legs
from moex.layers.moe import Steering
from moex.layers.tokens import Tokens
from moex.models.decoder import Layer
from moex.pipeline.residuals import Piece, zeros_like

Tree = Any

LOSSES = ("balance_loss", "sequence_loss", "global_loss", "z_loss")
"""Fields of `MoEStats` through which a layer adds to the loss."""


class Known(NamedTuple):
    """What a layer has in both passes.  whole: its weights, whatever is differentiated.  steering: without `seen_E`."""

    whole: Tree
    tokens: Tokens
    steering: Steering


class Given(NamedTuple):
    """x: activations [B, S, D].  seen: int32 [E], plain choices of earlier micro-batches; None in a dense layer."""

    x: jax.Array
    seen: jax.Array | None


class Out(NamedTuple):
    """x: activations.  losses: by name, empty for a dense layer."""

    x: Tree
    losses: dict[str, Tree]


Steps = Generator[Any, Any, None]
Build = Callable[[Tree, Known], Layer]
"""(weights to differentiate by, what is known) -> the layer."""


class Making(NamedTuple):
    """How a layer is made into pieces.  by_name: wraps what computes a piece, see `moex.memory.residuals`.  typed: makes a
    loss vary over the pipeline's axes.
    """

    build: Build
    by_name: Callable[[Callable], Callable]
    typed: Callable


@dataclasses.dataclass(frozen=True)
class Whole:
    """A layer in one piece."""

    piece: Piece

    @classmethod
    def of(cls, making: Making, fold: Fold, weights: Tree, known: Known, given: Given) -> "Whole":
        """For arguments like these."""

        def run(weights, known: Known, given: Given):
            steering = known.steering._replace(seen_E=given.seen)
            x, _, stats = making.build(weights, known)(given.x, None, steering, known.tokens, fold, training=True)
            return Out(x, _losses(stats, making.typed)), stats

        return cls(Piece.of(making.by_name(run), weights, known, given))

    @property
    def out_like(self) -> Out:
        return self.piece.out_like

    def forward(self, weights: Tree, known: Known, given: Given):
        """(`Out`, statistics or None, what is kept)."""
        return self.piece.forward(weights, known, given)

    def backward(self, weights: Tree, known: Known, kept: Tree, g: Out):
        """Cotangents of weights and activations."""
        of_weights, given = self.piece.backward(weights, known, kept, g)
        return of_weights, given.x


class Kept(NamedTuple):
    """Of each piece of a layer that is cut."""

    before: list
    there: list
    experts: list
    home: list
    after: list


@dataclasses.dataclass(frozen=True)
class Cut:
    """A sparse layer in three computations and two journeys.

    before: attention, router, what is sent.  there, home: the journeys.  experts.  after: sums of what came back. The weights
    of experts are apart from the others; none is in two pieces.
    """

    before: Piece
    there: Piece
    experts: Piece
    home: Piece
    after: Piece

    @classmethod
    def of(cls, making: Making, fold: Fold, weights: Tree, known: Known, given: Given) -> "Cut":
        """As `Whole.of`."""
        build = making.build

        def before(weights, known: Known, given: Given):
            steering = known.steering._replace(seen_E=given.seen)
            departed, beside, stats = build(weights, known).depart(given.x, steering, known.tokens, fold)
            out = departed.rows, departed.weights_R, beside, _losses(stats, making.typed)
            return out, (departed.plan, stats)

        def experts(weights, known: Known, arrived):
            return build(weights, known).at_experts(*arrived), None

        def after(weights, known: Known, landed):
            rows, plan, beside = landed
            return build(weights, known).land(rows, plan, beside, fold), None

        def there(weights, known, sent):
            with jax.named_scope("moe"), jax.named_scope("dispatch"):
                return legs.travel(*sent, fold=fold), None

        def home(weights, known, sent):
            with jax.named_scope("moe"), jax.named_scope("combine"):
                return legs.travel_home(*sent, fold=fold), None

        zeros = lambda tree: jax.tree.map(lambda like: like.zeros(), tree)
        parts = _parts(weights)
        plan = zeros_like(jax.eval_shape(before, parts.before, known, given)[1][0])
        first = Piece.of(making.by_name(before), parts.before, known, given)
        rows, weights_R, beside, _ = zeros(first.out_like)
        second = Piece.of(there, {}, None, (rows, plan))
        third = Piece.of(making.by_name(experts), parts.experts, known, (zeros(second.out_like), weights_R, plan))
        fourth = Piece.of(home, {}, None, (zeros(third.out_like), plan))
        last = Piece.of(making.by_name(after), parts.after, known, (zeros(fourth.out_like), plan, beside))
        return cls(first, second, third, fourth, last)

    @property
    def out_like(self) -> Out:
        return Out(self.after.out_like, self.before.out_like[3])

    def forward(self, weights: Tree, known: Known, given: Given):
        """As of `Whole`."""
        return _through(self.forward_parts(weights, known, given))

    def backward(self, weights: Tree, known: Known, kept: Kept, g: Out):
        """As of `Whole`."""
        return _through(self.backward_parts(weights, known, kept, g))

    def forward_parts(self, weights: Tree, known: Known, given: Given) -> Steps:
        """The forward pass, which stops before and after each journey: it yields what it goes on with, and is sent that."""
        parts = _parts(weights)
        (rows, weights_R, beside, losses), (plan, stats), before = self.before.forward(parts.before, known, given)
        rows = yield rows
        rows, _, there = self.there.forward({}, None, (rows, plan))
        rows = yield rows
        rows, _, experts = self.experts.forward(parts.experts, known, (rows, weights_R, plan))
        rows = yield rows
        rows, _, home = self.home.forward({}, None, (rows, plan))
        rows = yield rows
        x, _, after = self.after.forward(parts.after, known, (rows, plan, beside))
        yield Out(x, losses), stats, Kept(before, there, experts, home, after)

    def backward_parts(self, weights: Tree, known: Known, kept: Kept, g: Out) -> Steps:
        """The backward pass likewise."""
        parts = _parts(weights)
        of_after, (rows, _, beside) = self.after.backward(parts.after, known, kept.after, g.x)
        rows = yield rows
        rows = self.home.backward({}, None, kept.home, rows)[1][0]
        rows = yield rows
        of_experts, (rows, weights_R, _) = self.experts.backward(parts.experts, known, kept.experts, rows)
        rows, of_experts = yield rows, of_experts
        rows = self.there.backward({}, None, kept.there, rows)[1][0]
        rows = yield rows
        cotangent = rows, weights_R, beside, g.losses
        of_before, given = self.before.backward(parts.before, known, kept.before, cotangent)
        yield _joined(Parts(of_before, of_experts, of_after)), given.x


Chain = Whole | Cut


def both(forward: Steps, backward: Steps) -> tuple[tuple, tuple]:
    """What `forward_parts` of one layer and `backward_parts` of another yield last, run side by side in four phases."""
    phase = lax.optimization_barrier
    combined = backward.send(next(backward))  # gradients of results travel | attention, forward
    leaving = next(forward)
    combined, leaving = phase((combined, leaving))
    arrived = forward.send(leaving)  # rows travel | experts, backward
    going_home = backward.send(combined)
    arrived, going_home = phase((arrived, going_home))
    landed = backward.send(going_home)  # gradients of rows travel | experts, forward
    results = forward.send(arrived)
    landed, results = phase((landed, results))
    back = forward.send(results)  # results travel | attention, backward
    of_weights, dx = backward.send(landed)
    back, dx = phase((back, dx))
    return forward.send(back), (of_weights, dx)


def _through(parts: Steps) -> Any:
    """The last of what is yielded, nothing done in between."""
    last = next(parts)
    for _ in range(4):
        last = parts.send(last)
    return last


class Parts(NamedTuple):
    """Weights, or their cotangents, by piece."""

    before: Tree
    experts: Tree
    after: Tree


def _parts(weights: Mapping) -> Parts:
    pick = lambda wanted: {"moe": {name: w for name, w in weights["moe"].items() if wanted(name)}}
    before = dict(weights) | pick(lambda name: name not in ("experts", "latent_up"))
    return Parts(before, pick(lambda name: name == "experts"), pick(lambda name: name == "latent_up"))


def _joined(parts: Parts) -> dict:
    moe = parts.before["moe"] | parts.experts["moe"] | parts.after["moe"]
    return dict(parts.before) | {"moe": moe}


def _losses(stats, typed: Callable) -> dict:
    return {} if stats is None else {name: typed(getattr(stats, name)) for name in LOSSES}
