"""Chat loop for a seat of verifiers that names no harness.

It does what the harness `null` of verifiers does, without a new process for each turn and without `uv`. verifiers loads
it by HARNESS.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from heterorl.common.tasks.environments.openai_chat import OVER

HARNESS = "heterorl_chat"
"""Id of the harness: a module of this name in sys.modules."""
__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Chat loop of a seat."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: Any,
        runtime: Any,  # noqa: ARG002 - of the base class
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Draw turns until one calls no tool, or a limit."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        messages += [message_to_wire(each) for each in prompt or () if not isinstance(each, str)]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # Both addresses are this machine's, without TLS: to read certificates would take the time of a turn.
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None, verify=False))
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http)
            tools, names, connected = await connect_mcp({"mcpServers": servers}, stack)
            shown: dict[str, Any] = {"tools": tools} if tools else {}
            while True:
                try:
                    reply = await client.chat.completions.create(model=ctx.model, messages=messages, **shown)
                except BadRequestError as error:
                    if OVER not in str(error):
                        raise
                    # The turns up to here are scored.
                    trace.stop(OVER)
                    break
                said = reply.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls or ():
                    answer = {"role": "tool", "tool_call_id": call.id, "name": call.function.name}
                    if tool_interception_url:
                        verdict = await gate_tool_call(http, tool_interception_url, secret, call)
                        if verdict["action"] == "deny":
                            messages.append(bound_tool_message(verdict["message"]))
                            continue
                    content = await _called(connected, names, call.function)
                    messages.append(bound_tool_message({**answer, "content": content}))
                if not said.tool_calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _called(servers: Mapping[str, Any], names: Mapping[str, Any], function: Any) -> Any:
    """Content of a tool's result; the policy reads errors."""
    if function.name not in names:
        return f"error: unknown tool {function.name!r}"
    arguments = json.loads(function.arguments)
    return await call_mcp(dict(servers), dict(names), function.name, arguments)


sys.modules[HARNESS] = sys.modules[__name__]
