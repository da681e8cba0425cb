"""The papers' formulas over scalars, in 50 digits, each with a bound on what fp64 may make of it.

Nothing here is vectorised, and nothing is shared with the reference, which is held against it.
Every number carries a running error bound: how far a computation in fp64 may be off at that point,
as a multiple of u (Wilkinson; Higham, Accuracy and Stability of Numerical Algorithms, section 3.3).
So no tolerance is chosen: where terms cancel the bound is wide, elsewhere it is a few u.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import torch

MP = mpmath.MPContext()
MP.dps = 50

U = 2.0**-53

_FUNCTION = 2
"""The error of an elementary function in u: one unit in the last place, as SLEEF's names promise
(torch calls its `u10` functions), and the C library's are better."""


@dataclass(frozen=True, slots=True)
class Number:
    """A value in 50 digits, and how far off fp64 may be here, in u to first order."""

    value: Any
    error: Any = 0

    def __add__(self, other: "Number") -> "Number":
        value = self.value + other.value
        return Number(value, self.error + other.error + abs(value))

    def __sub__(self, other: "Number") -> "Number":
        return self + Number(-other.value, other.error)

    def __mul__(self, other: "Number") -> "Number":
        value = self.value * other.value
        error = abs(self.value) * other.error + abs(other.value) * self.error + abs(value)
        return Number(value, error)

    def __truediv__(self, other: "Number") -> "Number":
        value = self.value / other.value
        error = (self.error + abs(value) * other.error) / abs(other.value) + abs(value)
        return Number(value, error)


Row = Sequence[Number]
Matrix = Sequence[Row]


def number(value: float) -> Number:
    """Give a number that fp64 holds exactly."""
    return Number(MP.mpf(value))


def numbers(tensor: torch.Tensor | None) -> Any:
    """Give a tensor's values as nested lists of numbers."""
    if tensor is None:
        return None
    return _nested(tensor.detach().tolist())


def _nested(values: Any) -> Any:
    return [_nested(each) for each in values] if isinstance(values, list) else number(values)


def total(terms: Row) -> Number:
    """Give a sum, with a bound for any order of it.

    n roundings a term and not n - 1, so that a factor may also be drawn into the sum.
    """
    size = sum(abs(term.value) for term in terms)
    error = sum(term.error for term in terms)
    return Number(sum(term.value for term in terms), error + len(terms) * size)


def _inner(x: Row, y: Row) -> Number:
    return total([a * b for a, b in zip(x, y, strict=True)])


def _function(value: Any, slope: Any, x: Number) -> Number:
    return Number(value, abs(slope) * x.error + _FUNCTION * abs(value))


def _exp(x: Number) -> Number:
    return _function(MP.exp(x.value), MP.exp(x.value), x)


def _log(x: Number) -> Number:
    return _function(MP.log(x.value), 1 / x.value, x)


def _sqrt(x: Number) -> Number:
    root = MP.sqrt(x.value)
    return _function(root, 1 / (2 * root), x)


def _constant(value: Any) -> Number:
    """Give a number that fp64 rounds."""
    return Number(value, abs(value))


def gelu(x: Number) -> Number:
    """Give x Phi(x), Phi the distribution function of the normal distribution."""
    scaled = x / _constant(MP.sqrt(2))
    slope = 2 / MP.sqrt(MP.pi) * MP.exp(-(scaled.value**2))
    phi = (number(1) + _function(MP.erf(scaled.value), slope, scaled)) * number(0.5)
    return x * phi


def silu(x: Number) -> Number:
    """Give x / (1 + e^-x)."""
    return x / (number(1) + _exp(Number(-x.value, x.error)))


def softmax(scores: Row) -> list[Number]:
    """e^x_i / sum e^x_k; all are taken relative to the largest, as fp64 has to."""
    top = max(scores, key=lambda score: score.value)
    powers = [_exp(score - top) for score in scores]
    return [power / total(powers) for power in powers]


def cross_entropy(logits: Row, label: int) -> Number:
    """Give log sum e^x_k - x_label."""
    top = max(logits, key=lambda logit: logit.value)
    return _log(total([_exp(logit - top) for logit in logits])) + top - logits[label]


def norm(x: Row, gain: Row, bias: Row | None, centered: bool) -> list[Number]:
    """(x - mean) / sqrt(variance + 1e-5) gain + bias; RMSNorm has no mean."""
    count = number(len(x))
    if centered:
        mean = total(x) / count
        x = [each - mean for each in x]
    size = _sqrt(total([each * each for each in x]) / count + _constant(MP.mpf("1e-5")))
    y = [each / size * factor for each, factor in zip(x, gain, strict=True)]
    return y if bias is None else add(y, bias)


def add(x: Row, y: Row) -> list[Number]:
    """Give x + y."""
    return [a + b for a, b in zip(x, y, strict=True)]


def linear(x: Row, weight: Matrix, bias: Row | None) -> list[Number]:
    """Give W x + b."""
    y = [_inner(x, row) for row in weight]
    return y if bias is None else add(y, bias)


def rotate(x: Row, position: int) -> list[Number]:
    """Turn each pair (i, i + d/2) by the angle position / 10000^(2 i / d)."""
    half = len(x) // 2
    turned = list(x)
    for i in range(half):
        cosine, sine = angle(position, i, len(x))
        turned[i] = x[i] * cosine - x[i + half] * sine
        turned[i + half] = x[i + half] * cosine + x[i] * sine
    return turned


def angle(position: int, i: int, size: int) -> tuple[Number, Number]:
    """Give the cosine and sine of position / 10000^(2 i / d)."""
    exponent = number(-2 * i) / number(size)
    frequency = MP.mpf(10000) ** exponent.value
    turn = number(position) * _function(frequency, MP.log(10000) * frequency, exponent)
    cosine, sine = MP.cos(turn.value), MP.sin(turn.value)
    return _function(cosine, sine, turn), _function(sine, cosine, turn)


def attention(queries: Matrix, keys: Matrix, values: Matrix, causal: bool) -> list[list[Number]]:
    """softmax(q k / sqrt(d)) v of one head; each position sees itself and those before it."""
    scale = number(1) / _sqrt(number(len(queries[0])))
    found = []
    for position, query in enumerate(queries):
        seen = range(position + 1 if causal else len(keys))
        weights = softmax([_inner(query, keys[other]) * scale for other in seen])
        columns = range(len(values[0]))
        found.append([_inner(weights, [values[other][c] for other in seen]) for c in columns])
    return found


def self_attention(
    x: Matrix, weight: Matrix, bias: Row | None, heads: int, groups: int, rotary: bool, causal: bool
) -> list[list[Number]]:
    """Give the heads' results side by side, before the last matrix.

    The rows of the matrix are, group after group: its heads' queries, its key, its value.
    """
    size = len(x[0]) // heads
    per_group = heads // groups
    mixed = [linear(each, weight, bias) for each in x]

    def part(group: int, number_in_group: int, turned: bool) -> list[list[Number]]:
        first = (group * (per_group + 2) + number_in_group) * size
        rows = [each[first : first + size] for each in mixed]
        return [rotate(row, t) for t, row in enumerate(rows)] if turned else rows

    found: list[list[Number]] = [[] for _ in x]
    for head in range(heads):
        group = head // per_group
        result = attention(
            part(group, head % per_group, rotary),
            part(group, per_group, rotary),
            part(group, per_group + 1, False),
            causal,
        )
        for row, more in zip(found, result, strict=True):
            row.extend(more)
    return found


def cross_attention(
    x: Matrix, other: Matrix, query: tuple[Matrix, Row | None], pair: tuple[Matrix, Row | None],
    heads: int,
) -> list[list[Number]]:  # fmt: skip
    """The same with keys and values of another sequence: head after head, its key and its value."""
    size = len(x[0]) // heads
    queries = [linear(each, *query) for each in x]
    pairs = [linear(each, *pair) for each in other]
    found: list[list[Number]] = [[] for _ in x]
    for head in range(heads):
        at = 2 * head * size
        result = attention(
            [each[head * size : (head + 1) * size] for each in queries],
            [each[at : at + size] for each in pairs],
            [each[at + size : at + 2 * size] for each in pairs],
            causal=False,
        )
        for row, more in zip(found, result, strict=True):
            row.extend(more)
    return found


def mlp(x: Row, first: tuple[Matrix, Row | None], second: Matrix, gated: bool) -> list[Number]:
    """W2 gelu(W1 x + b), or W2 (silu(g) * v) with g and v the halves of W1 x + b."""
    inner = linear(x, *first)
    if gated:
        half = len(inner) // 2
        inner = [silu(g) * v for g, v in zip(inner[:half], inner[half:], strict=True)]
    else:
        inner = [gelu(each) for each in inner]
    return linear(inner, second, None)


def router_probabilities(logits: Row, chosen: Sequence[bool], softmax_first: bool) -> list[Number]:
    """Softmax over all and zero where not chosen, or softmax over the chosen."""
    among = [k for k in range(len(logits)) if softmax_first or chosen[k]]
    found = dict(zip(among, softmax([logits[k] for k in among]), strict=True))
    return [found[k] if chosen[k] else number(0) for k in range(len(logits))]


def weighted_sum(weights: Row, rows: Matrix) -> list[Number]:
    """Give the sum of rows, each times its weight."""
    return [_inner(weights, [row[c] for row in rows]) for c in range(len(rows[0]))]


def decay_mixer(x: Matrix, entry: Matrix, end: Matrix) -> list[list[Number]]:
    """W_out (silu(g_t) * sum over u <= t of v_u / 2^(t - u)), v and g the halves of W_in x."""
    mixed = [linear(each, entry, None) for each in x]
    half = len(mixed[0]) // 2
    found = []
    for t, each in enumerate(mixed):
        inner = []
        for c in range(half):
            past = [mixed[u][c] * number(math.ldexp(1.0, u - t)) for u in range(t + 1)]
            inner.append(silu(each[half + c]) * total(past))
        found.append(linear(inner, end, None))
    return found


def worst(seen: torch.Tensor, exact: Any) -> float:
    """Give the largest error of a tensor in units of its bound; not above 1 for a sound one."""
    ratios = []
    for x, y in zip(seen.detach().flatten().tolist(), _flat(exact), strict=True):
        error = abs(MP.mpf(x) - y.value)
        # The bounds are of first order in u.
        allowed = y.error * U * (1 + 2.0**-20)
        ratios.append(float(error / allowed) if error else 0.0)
    assert ratios
    return max(ratios)


def _flat(values: Any) -> list[Number]:
    if isinstance(values, Number):
        return [values]
    return [each for value in values for each in _flat(value)]


def by_batch(
    function: Callable[..., list[list[Number]]], *streams: torch.Tensor, **options: Any
) -> list[list[list[Number]]]:
    """Call a function of sequences [s, h] for each of a batch; give [s, b, h]."""
    each = [
        function(*(numbers(stream[:, b]) for stream in streams), **options)
        for b in range(streams[0].shape[1])
    ]
    return [list(rows) for rows in zip(*each, strict=True)]
