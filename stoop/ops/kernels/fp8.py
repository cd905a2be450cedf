"""fp8 (e4m3: 4 exponent bits with bias 7, 3 mantissa bits, no infinity) to and from other floats.

On a GPU, hardware instructions convert; in Triton's interpreter, which rounds and converts fp8 in
its own way, bit operations do. Caches come as bytes or as words of four.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FP8_MAX_BITS = tl.constexpr(0x43E00000)  # 448, the largest number that fp8 can hold, in float32
NAN_BITS = tl.constexpr(0x7F)


@triton.jit
def from_fp8(bits, dtype: tl.constexpr):
    """Convert bytes to float16 or float32, exactly."""
    if INTERPRETED:
        # As the upper bits of a float32, whose exponents have bias 127.
        size = (bits.to(tl.int32) & 0x7F) << 20
        value = size.to(tl.float32, bitcast=True) * 2.0**120
        value = tl.where((bits & 0x7F) == NAN_BITS, float("nan"), value)
        return tl.where(bits >= 0x80, -value, value).to(dtype)
    half = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return half.to(dtype)


@triton.jit
def unpack_fp8(words):
    """Take words apart into four float16 tiles: the lowest bytes first."""
    if INTERPRETED:
        return (
            from_fp8((words & 0xFF).to(tl.uint8), tl.float16),
            from_fp8(((words >> 8) & 0xFF).to(tl.uint8), tl.float16),
            from_fp8(((words >> 16) & 0xFF).to(tl.uint8), tl.float16),
            from_fp8(((words >> 24) & 0xFF).to(tl.uint8), tl.float16),
        )
    # Two words at a time: the bytes of equal place side by side, then two conversions at once.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high;
        .reg .b16 a, b, c, d;
        prmt.b32 low, $4, $5, 0x5140;
        prmt.b32 high, $4, $5, 0x7362;
        mov.b32 {a, b}, low;
        mov.b32 {c, d}, high;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        cvt.rn.f16x2.e4m3x2 $2, c;
        cvt.rn.f16x2.e4m3x2 $3, d;
        }""",
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def to_fp8(x, scale):
    """Divide by the scale, clamp to what fp8 can hold and round to nearest even; returns bytes.

    NaN stays NaN. The same code runs on GPUs and in the interpreter.
    """
    x = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, FP8_MAX_BITS)
    # From 2^-6 on: another bias, then drop 20 bits, to nearest even.
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # Below it, steps of 2^-9: the addition rounds, and leaves their number in the lowest bits.
    small = size.to(tl.float32, bitcast=True) + 16384.0
    small = small.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(is_nan, NAN_BITS, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
