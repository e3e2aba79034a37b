"""Kernels for NVIDIA's Hopper (sm_90), written in Gluon, Triton's lower-level language.

`support` says whether Gluon can be used and needs none of it, like the modules that launch kernels: `grouped_gemm` in
16 bits, `float8_launches` in 8 bits. All others import Gluon itself and are imported only where `support.HAS_GLUON`.
`ring` has the warp-specialized pipeline that all matrix products share.
"""
