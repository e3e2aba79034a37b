"""Kernels for NVIDIA's Hopper (sm_90), written in Gluon, Triton's lower-level language.

`support` says whether Gluon can be used and needs none of it. All others import Gluon and are imported only where
`support.HAS_GLUON`, by the modules that launch Triton's kernels elsewhere: `penstock.kernels.grouped_gemm` in 16 bits,
`penstock.kernels.float8`. `grouped_gemm_kernels` has the warp-specialized pipeline that all matrix products share.
"""
