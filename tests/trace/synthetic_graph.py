"""Traces of a training whose passes are captured graphs, with the truth about every kernel.

A pass is a list of kernels: embed, a dense layer, layers of experts, loss, and the way back. It is written down as an
eager pass (spans, operators, nodes of the backward graph around each launch), as a capture (the same without kernels),
or as a replay: one launch, and the kernels. Names are those of our kernels and of cuBLAS.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from penstock.base.spans import LAYER, MICRO_BATCH, Span
from penstock.trace.events import Trace
from penstock.trace.tree import NODE
from tests.trace.tiny import event, kernel, read, trace_of

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16> >"
CAST = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>"
GEMM = "nvjet_tst_{}x128_64x5_1x2_h_bz_NNT"


class Step(NamedTuple):
    """A kernel of a pass: where it stands in the model, and how long it takes."""

    name: str
    span: Span
    layer: int | None
    is_backward: bool
    us: float = 9.0


def _forward(layers: int, dense_layers: int) -> Iterator[Step]:
    yield Step("void at::native::vectorized_gather_kernel<16>", Span.EMBED, None, False)
    for layer in range(layers):
        yield Step("rms_norm_kernel", Span.NORM, layer, False)
        yield Step(GEMM.format(192), Span.ATTENTION, layer, False)
        yield Step("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", Span.ATTENTION, layer, False, 31.0)
        yield Step(GEMM.format(64), Span.ATTENTION, layer, False)
        yield Step("rms_norm_kernel", Span.NORM, layer, False)
        if layer < dense_layers:
            yield Step(GEMM.format(320), Span.DENSE, layer, False)
            yield Step("swiglu_kernel", Span.DENSE, layer, False)
        else:
            yield Step("route_kernel", Span.ROUTE, layer, False)
            yield Step("rows_kernel", Span.EXPERTS, layer, False, 47.0)
            yield Step("swiglu_kernel", Span.EXPERTS, layer, False)
            yield Step("rows_kernel", Span.EXPERTS, layer, False, 25.0)
        yield Step(ADD, Span.RESIDUAL, layer, False)
    yield Step("rms_norm_kernel", Span.NORM, None, False)
    yield Step(GEMM.format(256), Span.LOSS, None, False)
    yield Step("linear_cross_entropy_kernel", Span.LOSS, None, False)


def _backward(layers: int, dense_layers: int) -> Iterator[Step]:
    yield Step("rms_norm_backward_kernel", Span.NORM, None, True)
    yield Step(CAST, Span.NORM, None, True)
    for layer in reversed(range(layers)):
        if layer < dense_layers:
            yield Step(GEMM.format(321), Span.DENSE, layer, True)
            yield Step("swiglu_backward_kernel", Span.DENSE, layer, True)
        else:
            yield Step("weights_kernel", Span.EXPERTS, layer, True, 44.0)
            yield Step("rows_kernel", Span.EXPERTS, layer, True, 28.0)
            yield Step("swiglu_backward_kernel", Span.EXPERTS, layer, True)
            yield Step("route_backward_kernel", Span.ROUTE, layer, True)
        yield Step("rms_norm_backward_kernel", Span.NORM, layer, True)
        yield Step("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", Span.ATTENTION, layer, True, 66.0)
        yield Step(GEMM.format(193), Span.ATTENTION, layer, True)
        yield Step("rms_norm_backward_kernel", Span.NORM, layer, True)
        yield Step(CAST, Span.NORM, layer, True)
    yield Step("void indexing_backward_kernel<float>", Span.EMBED, None, True)


class Recording:
    """A trace on its way: passes are appended one after the other."""

    def __init__(self, *, layers: int = 4, dense_layers: int = 1) -> None:
        self.steps = [*_forward(layers, dense_layers), *_backward(layers, dense_layers)]
        self.model: dict[str, Any] = {"layers": layers, "dense_layers": dense_layers, "moe": {"experts": 8}}
        self.truth: list[Step] = []  # of each kernel
        self.events: list[dict[str, Any]] = []
        self._at = 0.0
        self._number = 0
        self._micro_batch = 0

    def trace(self, *, says_model: bool = True) -> Trace:
        content = self.content()
        if not says_model:
            del content["penstock"]
        return read(content)

    def content(self) -> dict[str, Any]:
        return trace_of(*self.events) | {"penstock": {"config": {"model": self.model}}}

    def eager(self) -> Self:
        self._host(runs=True)
        return self

    def captured(self) -> Self:
        self._call("cudaStreamBeginCapture", self._at)
        self._host(runs=False)
        self._call("cudaStreamEndCapture", self._at)
        self._at += 5
        return self

    def replay(self, steps: list[Step] | None = None) -> Self:
        steps = self.steps if steps is None else steps
        begin, self._number = self._at, self._number + 1
        self._call("cudaGraphLaunch", begin + 2, self._number)
        at = begin + 10.0
        for step in steps:
            self.events.append(kernel(step.name, at, step.us, correlation=self._number))
            at += step.us + 1.0
        self.truth += steps
        self._close(begin, at)
        return self

    def _host(self, *, runs: bool) -> None:
        begin = self._at
        device, host = begin + 20.0, begin + 4.0
        sequences: dict[tuple[Span, int | None], int] = {}
        for step in self.steps:
            self._number += 1
            where = (step.span, step.layer)
            if step.is_backward:
                number = sequences.get(where, 10_000 + self._number)
                args = {"Sequence number": number, "Fwd thread id": 1}
                self.events.append(event("cpu_op", f"{NODE}SomeBackward0", host, 4.0, **args))
            else:
                sequences.setdefault(where, self._number)
                if step.layer is not None:
                    self.events.append(event("user_annotation", LAYER.format(step.layer), host - 0.4, 5.0))
                self.events.append(event("user_annotation", step.span, host - 0.2, 4.6))
                self.events.append(event("cpu_op", "aten::some", host, 4.0, **{"Sequence number": self._number}))
            self._call("cudaLaunchKernel", host + 1.0, self._number)
            if runs:
                self.events.append(kernel(step.name, max(device, host + 2.0), step.us, correlation=self._number))
                device = max(device, host + 2.0) + step.us + 1.0
            host += 6.0
        if runs:
            self.truth += self.steps
        self._close(begin, max(host, device) if runs else host)

    def _call(self, name: str, at: float, number: int = 0) -> None:
        self.events.append(event("cuda_runtime", name, at, 1.0, correlation=number))

    def _close(self, begin: float, end: float) -> None:
        name = MICRO_BATCH.format(self._micro_batch)
        self.events.append(event("user_annotation", name, begin + 0.5, end - begin))
        self._micro_batch += 1
        self._at = end + 20.0
