"""Scales and 8-bit numbers inside Triton kernels, equal to `reference` bit for bit.

A kernel reduces the `magnitude_bits` of its numbers with `tl.max`, gives the result to `scale_of`, and both to
`to_float8`:

    amax_R1 = tl.max(magnitude_bits(x_RD), 1, keep_dims=True)
    scale_R1 = scale_of(amax_R1, LARGEST, POWER)
    tl.store(values_ptrs, to_float8(x_RD, scale_R1, values_ptr.dtype.element_ty, LARGEST, POWER))

Magnitudes are compared as integers, which orders them as numbers do and puts NaN above all, so it is never lost. The
power of two that is not less than amax / LARGEST comes from an addition to the bits, which carries into the exponent if
the mantissa of amax is larger than that of LARGEST. Dividing by a power of two is multiplying by another one, so
neither rounds.

Triton's interpreter truncates 8-bit numbers where chips round them, and knows no NaN in them. Under the interpreter
they are made and read by integer arithmetic, so that tests can ask for equality.
"""

from penstock.kernels.language import tl, triton

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def bits_of(number: float) -> int:
    """Bits of a number >= 1 as float32, as a constant of the compiler."""
    exponent = 127
    while number >= 2:
        number, exponent = number / 2, exponent + 1
    return (exponent << 23) + int((number - 1) * 2**23)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as a float32, int32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """Float32 scale of blocks from the bits of their largest magnitudes.

    LARGEST is the format's largest number; POWER rounds up to a power of two. Example with LARGEST 448: the largest
    magnitude 900 gives 900 / 448 = 2.009, and 4 with POWER.
    """
    if POWER:
        CARRY: tl.constexpr = 0x7FFFFF - (bits_of(LARGEST) & 0x7FFFFF)
        # 127 << 23 is the bits of 1, 1 << 23 those of the least scale.
        DOWN: tl.constexpr = (bits_of(LARGEST) & 0x7F800000) - (127 << 23)
        bits = tl.maximum(((amax_bits + CARRY) & 0x7F800000) - DOWN, 1 << 23)
        scale = tl.where(amax_bits >= 0x7F800000, amax_bits, bits).to(tl.float32, bitcast=True)
    else:
        ratio = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), tl.full(amax_bits.shape, LARGEST, tl.float32))
        scale = tl.where(ratio < 2.0**-126, 2.0**-126, ratio)
    return scale


@triton.jit
def to_float8(x, scale, dtype: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """X / scale in 8 bits, to the nearest, halves to even; NaN stays NaN."""
    if POWER:
        divided = x * inverse_of(scale)
    else:
        # A quotient that is wrong at most in its last bit, and a correction: as exact as a division (Markstein 1990,
        # IBM J. Res. Dev. 34) of numbers above 2**-100, which takes ten times the instructions. The signs keep -0.
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        nearly = x * inverse
        excess = tl.fma(nearly, tl.where(inverse == 0.0, 0.0, scale), -x)
        divided = tl.fma(excess, -inverse, nearly)
    if INTERPRETED:
        return _encode(divided, dtype)
    return divided.to(dtype)


@triton.jit
def inverse_of(scale):
    """1 / a scale that is a power of two; 0 for infinity, NaN for NaN."""
    bits = scale.to(tl.int32, bitcast=True)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, inverse, tl.where(bits == 0x7F800000, 0.0, scale))


@triton.jit
def to_float32(values, dtype: tl.constexpr):
    """8-bit numbers as float32; other dtypes are cast."""
    if INTERPRETED and dtype.primitive_bitwidth == 8:
        return _decode(values, dtype)
    return values.to(tl.float32)


@triton.jit
def exponent_of(scale):
    """A power of two as E8M0; what is not finite becomes its NaN, 255."""
    return (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def power_of(exponent):
    """E8M0 as float32: 2**(exponent - 127), which is subnormal for 0; 255 is NaN."""
    bits = exponent.to(tl.int32) << 23
    bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, dtype: tl.constexpr):
    """The interpreter's cast to 8 bits. FNUZ, whose bias is larger by one, has no -0, and 0x80 for NaN."""
    MANTISSA: tl.constexpr = dtype.fp_mantissa_width
    BIAS: tl.constexpr = dtype.exponent_bias
    FNUZ: tl.constexpr = BIAS == 2 ** (6 - MANTISSA)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Adding 1.5 * 2**(23 - MANTISSA) times the number's own power of two rounds to MANTISSA bits behind the first.
    power = tl.maximum(size & 0x7F800000, (128 - BIAS) << 23)
    magic = ((power + ((23 - MANTISSA) << 23)) | 0x400000).to(tl.float32, bitcast=True)
    rounded = ((size.to(tl.float32, bitcast=True) + magic) - magic).to(tl.int32, bitcast=True)
    normal = (rounded >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    small = rounded.to(tl.float32, bitcast=True) * 2.0 ** (BIAS + MANTISSA - 1)
    is_normal = rounded >= ((128 - BIAS) << 23)
    code = tl.where(is_normal, normal, tl.where(is_normal, 0.0, small).to(tl.int32))
    sign = (bits >> 24) & 0x80
    if FNUZ:
        code = tl.where(size > 0x7F800000, 0x80, tl.where(code == 0, 0, code | sign))
    else:
        code = tl.where(size > 0x7F800000, 0x7F, code) | sign
    return code.to(tl.uint8).to(dtype, bitcast=True)


@triton.jit
def _decode(values, dtype: tl.constexpr):
    """The interpreter's cast from 8 bits."""
    MANTISSA: tl.constexpr = dtype.fp_mantissa_width
    BIAS: tl.constexpr = dtype.exponent_bias
    FNUZ: tl.constexpr = BIAS == 2 ** (6 - MANTISSA)
    code = values.to(tl.uint8, bitcast=True).to(tl.int32)
    size = code & 0x7F
    normal = ((size << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 2**MANTISSA, size.to(tl.float32) * 2.0 ** (1 - BIAS - MANTISSA), normal)
    if FNUZ:
        number = tl.where(code == 0x80, float("nan"), number)
    elif MANTISSA == 3:
        number = tl.where(size == 0x7F, float("nan"), number)
    else:
        number = tl.where(size > 0x7C, float("nan"), tl.where(size == 0x7C, float("inf"), number))
    return tl.where(code >= 0x80, -number, number)
