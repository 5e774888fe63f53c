"""Server interceptor: typed errors become statuses, every rpc is timed; so handlers contain no try/except."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from heterorl.common.errors import HeterorlError
from heterorl.common.process.metrics import RPC_SECONDS
from heterorl.common.rpc.status import reason_of, to_status

_LOG = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]


class ErrorsAndTimes(grpc.aio.ServerInterceptor):
    """Wraps every handler once."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = str(handler_call_details.method).rpartition("/")[2]
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else (grpc.unary_stream_rpc_method_handler)
            )
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            return make(_stream(inner, method), handler.request_deserializer, handler.response_serializer)
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else (grpc.unary_unary_rpc_method_handler)
        )
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return make(_unary(inner, method), handler.request_deserializer, handler.response_serializer)


def _unary(inner: Any, method: str) -> Callable[[Any, _Context], Awaitable[Any]]:
    async def call(request: Any, context: _Context) -> Any:
        async with _answered(method, context):
            return await inner(request, context)

    return call


def _stream(inner: Any, method: str) -> Callable[[Any, _Context], AsyncIterator[Any]]:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        async with _answered(method, context):
            async for answer in inner(request, context):
                yield answer

    return call


@contextlib.asynccontextmanager
async def _answered(method: str, context: _Context) -> AsyncIterator[None]:
    """Time a call; one that a typed error ends is aborted with its status. A call that goes away is no answer."""
    started = time.perf_counter()
    try:
        yield
    except HeterorlError as error:
        code, message, trailers = to_status(error)
        _observe(method, reason_of(error), started)
        _LOG.debug("%s refused: %s", method, error)
        await context.abort(code, message, trailers)
    except Exception:
        # A defect here: gRPC answers UNKNOWN, and it must not look like a call that never was.
        _observe(method, "internal", started)
        raise
    else:
        _observe(method, "OK", started)


def _observe(method: str, code: str, started: float) -> None:
    RPC_SECONDS.labels("server", method, code).observe(time.perf_counter() - started)
