"""Matrices of 8-bit integers with a scale for each row, and their products.

A decoding step reads every weight once, and the memory's speed decides how long that takes: in 8
bits they are a quarter of float32's bytes. Row i of a matrix W is s_i·W_i, with W_i whole numbers
from −127 to 127 and s_i the row's largest magnitude over 127.

Activations are far less alike than weights: with 8 bits for each of them, too, the packaged model
chose another token than in float32 at every tenth place of a text; the weights' alone change one
in 20 to 24. Hence *two* 8-bit digits for an activation, 256·high + low in steps of its token's
largest magnitude over 32512, of which the error is lost in that of the weights. A product of whole
numbers,

    W x = s · step · (256 · Σ W high + Σ W low),

has sums that nothing rounds: the same bits for any number of tokens, in any order, in any parts.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Int8

from treeattn.idea.arrays import Array

LARGEST = 127  # of a weight, and of a high digit: −128 would have no opposite
BASE = 256
LARGEST_ACTIVATION = LARGEST * BASE  # in steps: its low digit is then 0
# The sum of so many products of a weight with a digit of up to 128 stays below 2³¹.
LONGEST_ROW = (2**31 - 1) // (LARGEST * 128)

# Products of up to so many tokens are those of whole numbers. With AVX-512 VNNI, a model's step
# then takes 0.65 of float32's time for 1 to 32 tokens, 0.8 for 64 and 128, and 0.9 for 512; up to
# jax 0.10 XLA had no fast ones: 0.7 for one token, 1 for 8, 1.2 for 16 and 1.9 for 64.
INTEGER_TOKENS = 1024 if jax.__version_info__ >= (0, 11) else 8
# More tokens are multiplied with floats, of which so many bytes are made at a time: they are read
# again where they were written, in a core's cache of 2 MB. That takes 1.0 to 1.1 of float32's time
# for 16 tokens, 1.2 for 32 and 1.3 for 64; with half as many bytes 1.25, 1.35 and 1.5.
FLOAT_BYTES = 2**21
# For more tokens than these the whole matrix is made first, which is 2 % of the work for 1,024.
MANY_TOKENS = 64


class Int8Matrix(NamedTuple):
    """A matrix (out, d) of rows[i] · scale[i]; `dtype` is that of what is computed with it."""

    rows: Int8[Array, "out d"]
    scale: Float[Array, " out"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    @property
    def dtype(self):
        return self.scale.dtype


def quantize(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows int8 (out, d), scale float32 (out,)) nearest to a matrix of floats, row by row.

    Raises ValueError for numbers that are not finite, and rows too long for sums in 32 bits.
    """
    if matrix.shape[1] > LONGEST_ROW:
        longest = f"rows of at most {LONGEST_ROW} numbers"
        raise ValueError(f"weights: int8 sums {longest} in 32 bits, got {matrix.shape[1]}")
    matrix = matrix.astype(np.float32, copy=False)
    largest = np.maximum(matrix.max(axis=1), -matrix.min(axis=1))
    if not np.isfinite(largest).all():
        raise ValueError("weights: int8 needs finite numbers, got one that is not")
    scale = largest / np.float32(LARGEST)
    divisor = np.where(scale > 0, scale, np.float32(1))[:, None]  # of a row of zeros
    steps = np.divide(matrix, divisor)
    np.rint(steps, out=steps)
    np.clip(steps, -LARGEST, LARGEST, out=steps)  # where the smallest of scales is rounded
    return steps.astype(np.int8), scale


def product(x: Float[Array, "... d"], matrix: Int8Matrix) -> Float[Array, "... out"]:
    """x Wᵀ in the matrix's dtype."""
    tokens = x.reshape(-1, x.shape[-1])
    if len(tokens) > INTEGER_TOKENS:
        y = product_of_floats(tokens, matrix.rows) * matrix.scale
        return y.reshape(*x.shape[:-1], len(matrix.rows))
    return exact_product(x, matrix)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def exact_product(
    x: Float[Array, "... d"], matrix: Int8Matrix, axes: tuple[str, ...] = ()
) -> Float[Array, "... out"]:
    """`product` of whole numbers, for any number of tokens.

    axes: of a mesh, each device of which has its part of x and of the matrix's columns. They agree
          on a token's largest magnitude first: then the sums over them are of the same whole
          numbers as on one device, and so are the bits.

    Its derivative is that of the product of floats, which digits approach in steps: a step's own
    derivative is 0 and says nothing.
    """
    tokens = x.reshape(-1, x.shape[-1])
    largest = largest_magnitude(tokens)
    largest = jax.lax.pmax(largest, axes) if axes else largest
    digits, step = to_digits(tokens, largest)
    sums = sums_of_products(digits, matrix.rows)
    sums = jax.lax.psum(sums, axes) if axes else sums
    return from_sums(step, matrix.scale, sums).reshape(*x.shape[:-1], len(matrix.rows))


@exact_product.defjvp
def _derivative_of_floats(axes, primals, tangents):
    x, matrix = primals
    dx, dmatrix = tangents

    def of_floats(x, scale):
        y = product_of_floats(x.reshape(-1, x.shape[-1]), matrix.rows) * scale
        y = jax.lax.psum(y, axes) if axes else y
        return y.reshape(*x.shape[:-1], len(scale))

    _, dy = jax.jvp(of_floats, (x, matrix.scale), (dx, dmatrix.scale))
    return exact_product(x, matrix, axes), dy


def summed_product(
    x: Float[Array, "... part"], matrix: Int8Matrix, axes: tuple[str, ...]
) -> Float[Array, "... out"]:
    """`product`, where each device of `axes` has its part of x and of the matrix's columns."""
    if math.prod(x.shape[:-1]) > INTEGER_TOKENS:
        return jax.lax.psum(product(x, matrix), axes)
    return exact_product(x, matrix, axes)


def product_of_floats(x: Float[Array, "n d"], rows: Int8[Array, "out d"]) -> Float[Array, "n out"]:
    """x times the rows as floats; those are made some at a time, or all at once."""
    if len(x) > MANY_TOKENS:
        return jnp.einsum("nd,od->no", x, rows.astype(x.dtype))
    out, d = rows.shape
    blocks = -(-out * d * x.dtype.itemsize // FLOAT_BYTES)
    blocks = next((n for n in range(blocks, 2 * blocks) if out % n == 0), blocks)
    size = -(-out // blocks)  # alike, or all but the last ones
    whole = out // size * size

    def multiply(_, block):
        return None, jnp.einsum("od,nd->on", block.astype(x.dtype), x)

    _, first = jax.lax.scan(multiply, None, rows[:whole].reshape(-1, size, d))
    _, last = multiply(None, rows[whole:])
    return jnp.concatenate([first.reshape(whole, len(x)), last]).T


def largest_magnitude(x: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Of each token's activations. A maximum is exact: in any order the same number."""
    return jnp.max(jnp.abs(x), axis=-1)


def to_digits(
    x: Float[Array, "n d"], largest: Float[Array, " n"]
) -> tuple[Int8[Array, "2*n d"], Float[Array, " n"]]:
    """(the high digits, and below them the low ones; the step of each token): x rounded to
    (256·high + low)·step."""
    step = largest * np.float32(1 / LARGEST_ACTIVATION)
    divisor = jnp.where(step > 0, step, 1)[:, None]  # of a token of zeros
    whole = jnp.clip(jnp.round(x / divisor), -LARGEST_ACTIVATION, LARGEST_ACTIVATION)
    whole = whole.astype(jnp.int32)
    high = (whole + BASE // 2) >> 8  # rounded down: a division would take several times as long
    low = whole - (high << 8)  # from −128 to 127
    return jnp.concatenate([high, low]).astype(jnp.int8), step


def sums_of_products(digits: Int8[Array, "n d"], rows: Int8[Array, "out d"]) -> Int[Array, "n out"]:
    """The digits times the matrix's rows, summed exactly."""
    along_d = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(digits, rows, along_d, preferred_element_type=jnp.int32)


def from_sums(
    step: Float[Array, " n"], scale: Float[Array, " out"], sums: Int[Array, "2*n out"]
) -> Float[Array, "n out"]:
    """The activations that the sums over high digits, and below them over low ones, stand for."""
    high, low = jnp.split(sums.astype(scale.dtype), 2)
    return (high * BASE + low) * step[:, None] * scale
