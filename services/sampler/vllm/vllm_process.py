"""vLLM's asynchronous engine as blocking calls.

Its event loop is in a thread, the model in another process.

A worker process gets only a method's name, plain values and a file's path, never code or a pickled tensor. Every
failure of vLLM is an EngineError. `close` ends the process. The caller decides about versions.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from heterorl.common.errors import DependencyMissing, EngineDied
from heterorl.common.model.library_versions import check_package

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
NO_VERSION = "default"
"""vLLM's label of tokens drawn before a label was set."""
START_S = 1800.0
"""Timeout of a start: a large model from a slow disk."""
LOOK_S = 0.5
"""Time between looks whether a start is given up."""
CORE = "EngineCore"
"""How the names of vLLM's processes begin."""
_DESCRIBING = threading.Lock()
URGENT = -1
"""vLLM's priority of questions; completions have 0, and among equals the first comes first."""
ANSWER_S = 600.0
"""Timeout of a swap or a question; submitted requests have none."""


def import_vllm() -> Any:
    """The package, which takes seconds to import.

    Raises DependencyMissing: it is not installed; DependencyUnsupported: this release does not work with its version.
    """
    check_package("vllm")
    # Read at import. Usage reports would go to a third party.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Standard output is for tables and JSON of commands.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        import vllm
    except ImportError as error:
        raise DependencyMissing("vllm", "vllm") from error
    return vllm


class VllmProcess:
    """One running engine; a restart makes a new one."""

    def __init__(self, arguments: Mapping[str, Any], *, max_running: int, is_stopped: threading.Event) -> None:
        """Start the process with arguments of vLLM's AsyncEngineArgs and load its model.

        vLLM gets at most `max_running` requests at once: requests that wait here belong to no version yet.
        `max_num_seqs` above it and scheduling_policy "priority" are for urgent requests. `is_stopped` gives the start
        up.

        Raises DependencyMissing: vLLM is not installed; EngineDied: it does not start, or its start is given up.
        """
        vllm = import_vllm()
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # Recorded graphs pay off only on a GPU. A seeded prompt read in chunks would end the process: vLLM then
            # rewinds the generator, and a CPU's cannot be.
            arguments = {"enforce_eager": True, "enable_chunked_prefill": False, **arguments}
        if arguments.get("enforce_eager"):
            # Without this vLLM's sampler would run a C++ compiler at its first token.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        self._sampling_params = vllm.SamplingParams
        self._tokens_prompt = vllm.inputs.TokensPrompt
        self._num_requests = 0
        self._num_swaps = 0
        # Ids of requests without a token, oldest first.
        self._tokenless: dict[str, None] = {}
        self._adapter: Any = None
        self._slots = asyncio.Semaphore(max_running)
        self._open = asyncio.Event()
        self._open.set()
        # All requests in flight, and the submitted ones among them.
        self._running: set[asyncio.Task[Any]] = set()
        self._submitted: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._engine: Any = self._started(arguments, is_stopped)
            self.call("end_with", os.getpid())
        except EngineDied:
            self._end_loop()
            raise

    def submit(self, ids: Sequence[int], settings: Mapping[str, Any], on_end: Callable[[Any], None]) -> None:
        """Take prompt ids and sampling parameters; raises EngineDied once closed.

        Its thread calls `on_end` with vLLM's RequestOutput or EngineDied, unless the request is cancelled.
        """
        try:
            self._loop.call_soon_threadsafe(self._begin, ids, settings, on_end)
        except RuntimeError as error:
            raise EngineDied("vLLM is not running") from error

    def ask(self, requests: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> list[Any]:
        """RequestOutput for each (prompt ids, parameters), ahead of submitted requests that wait.

        Raises EngineDied: the process ended, refused a request, or gave the requests up.
        """
        return self._wait(self._ask(requests), ANSWER_S)

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._submitted])

    def call(self, method: str, *arguments: str | int | Mapping[str, str] | None) -> list[Any]:
        """Call a worker extension's method in every worker; returns their answers.

        Raises EngineDied: one of them failed.
        """
        return self._wait(self._engine.collective_rpc(method, timeout=ANSWER_S, args=arguments), 2 * ANSWER_S)

    def swap(self, method: str, *arguments: str | Mapping[str, str], num_tensors: int, label: str) -> None:
        """Change weights between two tokens; requests in flight continue with them.

        The worker extension's method must answer `num_tensors` in every worker; later tokens carry `label`. Raises
        EngineDied if a worker failed or read something else: generation stays paused; call `give_up`.
        """
        self._wait(self._swap(method, arguments, num_tensors, label), 3 * ANSWER_S)

    def swap_adapter(self, directory: str, *, label: str) -> None:
        """Change the adapter from `peft`'s files, as `swap` changes weights.

        Raises EngineDied: vLLM does not take it; generation stays paused; call `give_up`.
        """
        self._wait(self._swap_adapter(directory, label), 3 * ANSWER_S)

    def set_version(self, label: str) -> None:
        """Label later tokens; no request begins with older keys and values."""
        self._wait(self._set_version(label), ANSWER_S)

    def give_up(self) -> None:
        """End all requests, questions too: `ask` raises EngineDied."""
        self._wait(self._give_up(), ANSWER_S)

    def close(self) -> None:
        try:
            # Before the process is gone: else callers would wait for its answers.
            self.give_up()
            self._wait(_shutdown(self._engine), ANSWER_S)
        except EngineDied as error:
            _LOG.info("the engine had ended before its stop: %s", error)
        self._end_loop()

    def _begin(self, ids: Sequence[int], settings: Mapping[str, Any], on_end: Callable[[Any], None]) -> None:
        task = self._loop.create_task(self._in_turn(ids, settings))
        self._running.add(task)
        self._submitted.add(task)

        def end(task: asyncio.Task[Any]) -> None:
            self._running.discard(task)
            self._submitted.discard(task)
            if not task.cancelled():
                error = task.exception()
                on_end(_died(error) if error else task.result())

        task.add_done_callback(end)

    async def _ask(self, requests: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> list[Any]:
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(self._one(ids, settings, URGENT)) for ids, settings in requests]
            self._running.update(waiting)
            for task in waiting:
                task.add_done_callback(self._running.discard)
        return [task.result() for task in waiting]

    async def _in_turn(self, ids: Sequence[int], settings: Mapping[str, Any]) -> Any:
        async with self._slots:
            return await self._one(ids, settings, 0)

    async def _one(self, ids: Sequence[int], settings: Mapping[str, Any], priority: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        # The first token, and the others at the end.
        parameters = self._sampling_params(
            **settings, output_kind=RequestOutputKind.DELTA, stream_interval=settings["max_tokens"]
        )
        while True:
            # During a swap it would compute with new weights on cached prefixes of the old ones.
            await self._open.wait()
            if (result := await self._answer(ids, parameters, priority)) is not None:
                return result

    async def _answer(self, ids: Sequence[int], parameters: Any, priority: int) -> Any:
        """None if a swap came before the first token.

        The old weights may have read some of the prompt.
        """
        self._num_requests += 1
        name, num_swaps = str(self._num_requests), self._num_swaps
        prompt = self._tokens_prompt(prompt_token_ids=list(ids), cache_salt=str(num_swaps))
        result: Any = None
        self._tokenless[name] = None
        try:
            answers = self._engine.generate(
                prompt, parameters, request_id=name, lora_request=self._adapter, priority=priority
            )
            async with contextlib.aclosing(answers):
                async for output in answers:
                    if result is not None:
                        result.add(output, aggregate=True)
                    elif self._num_swaps != num_swaps:
                        return None
                    else:
                        del self._tokenless[name]
                        result = output
        finally:
            self._tokenless.pop(name, None)
        return result

    async def _swap(self, method: str, arguments: Sequence[Any], num_tensors: int, label: str) -> None:
        await self._pause()
        counts = await self._engine.collective_rpc(method, timeout=ANSWER_S, args=tuple(arguments))
        if set(counts) != {num_tensors}:
            raise RuntimeError(f"the workers read {counts} tensors of {num_tensors}")
        await self._set_version(label)
        await self._engine.resume_generation()

    async def _swap_adapter(self, directory: str, label: str) -> None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name="policy", lora_int_id=1, lora_path=directory)
        await self._pause()
        # In place, under the number that requests in flight have.
        loaded = LoRARequest(lora_name="policy", lora_int_id=1, lora_path=directory, load_inplace=True)
        if not await self._engine.add_lora(loaded):
            raise RuntimeError("the adapter was not loaded")
        self._adapter = request
        await self._set_version(label)
        await self._engine.resume_generation()

    async def _pause(self) -> None:
        self._open.clear()
        # Keeps requests with keys and values; returns when the last output of the old weights is labelled.
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def _set_version(self, label: str) -> None:
        # The salt is part of every block's key: prefixes of older weights are never found again.
        self._num_swaps += 1
        # Now, or they would wait for memory, and their tokens would be thrown away.
        if waiting := list(self._tokenless):
            _LOG.debug("%d requests without a token begin again with version %s", len(waiting), label)
            await self._engine.abort(waiting)
        if not self._running and not await self._engine.reset_prefix_cache():
            raise RuntimeError("requests were in flight while the version changed")
        await self._engine.update_weight_version(label)
        self._open.set()

    async def _give_up(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _started(self, arguments: Mapping[str, Any], is_stopped: threading.Event) -> Any:
        """vLLM's engine; the loop's thread hangs while vLLM starts its process."""
        older = _processes()
        future = asyncio.run_coroutine_threadsafe(_start(arguments, is_stopped), self._loop)
        for _ in range(round(START_S / LOOK_S)):
            if concurrent.futures.wait([future], LOOK_S).done:
                break
            if is_stopped.is_set():
                # vLLM's start fails when its process is gone.
                for process in _processes() - older:
                    process.kill()
        try:
            return self._result(future, 0.0, START_S)
        except EngineDied as error:
            if is_stopped.is_set():
                raise EngineDied("vLLM's start was given up", action="") from error
            raise

    def _wait(self, work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        return self._result(asyncio.run_coroutine_threadsafe(work, self._loop), timeout_s, timeout_s)

    def _result(self, future: concurrent.futures.Future[_T], timeout_s: float, waited_s: float) -> _T:
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise EngineDied(f"vLLM gave no answer in {waited_s:.0f} s") from error
        except concurrent.futures.CancelledError as error:
            raise EngineDied("vLLM was told to give up what it was generating") from error
        except Exception as error:
            raise _died(error) from error

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()


def _died(error: BaseException) -> EngineDied:
    cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
    return EngineDied(f"vLLM: {type(cause).__name__}: {cause}")


def _processes() -> set[BaseProcess]:
    """vLLM's processes of this one's engines."""
    return {process for process in multiprocessing.active_children() if process.name.startswith(CORE)}


async def _start(arguments: Mapping[str, Any], is_stopped: threading.Event) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    # Engines start in parallel, but their configuration goes through globals of the package.
    with _DESCRIBING:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    if is_stopped.is_set():
        raise EngineDied("the engine is stopped")
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


async def _shutdown(engine: Any) -> None:
    engine.shutdown()
