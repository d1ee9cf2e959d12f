"""Questions straight to one worker, past routers and gateways: who it is, greedy answers, how likely a text is."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
from kvmesh.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from services.cli.errors import CliError
from services.common.blocks import block_root, cache_namespace, chain_block_ids, join_ids, owner_digest
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret

# Whose blocks the probes' are; no client is called so.
_TENANT = "kvmesh.probe"
_IDENTITY_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 60.0
# What a full worker answers is "stale": asked again after this.
_RETRY_S = 0.1
# The largest bias there is. A token that it does not make the likeliest one is less likely by at least so many nats.
_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of an answer with their log probabilities, and when the first and the last came (seconds)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    first_s: float
    last_s: float


class ProbeClient:
    """One worker. Every client has cache blocks of its own, so that the first of equal prompts is computed anew."""

    def __init__(
        self, stub: worker_pb2_grpc.WorkerAsyncStub, identity: worker_pb2.WorkerIdentity, secret: MeshSecret
    ) -> None:
        self.identity = identity
        self._stub = stub
        self._secret = secret
        self._salt = uuid.uuid4().hex

    async def greedy(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """The likeliest tokens, end-of-sequence ones among them. Raises CliError."""
        return await self._ask(prompt, num_tokens, common_pb2.SamplingParams())

    async def logprob(self, prompt: Sequence[int], token: int) -> float:
        """Natural log probability of one token after a prompt, at least -100. Raises CliError."""
        answer = await self._ask(prompt, 1, common_pb2.SamplingParams(logit_bias={token: _BIAS}))
        return max(answer.logprobs[0], -_BIAS) if answer.tokens == (token,) else -_BIAS

    async def _ask(self, prompt: Sequence[int], num_tokens: int, sampling: common_pb2.SamplingParams) -> Answer:
        sampling.MergeFrom(common_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1, num_logprobs=0))
        request = self._request(prompt, num_tokens, sampling)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                while (answer := await self._attempt(request)) is None:
                    await asyncio.sleep(_RETRY_S)
                    request.attempt += 1
        except TimeoutError:
            raise CliError(f"{self.identity.worker_id} does not answer a probe in {_ANSWER_TIMEOUT_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            raise CliError(f"{self.identity.worker_id} fails a probe: {reason}") from None
        return answer

    async def _attempt(self, request: worker_pb2.WorkerGenerateRequest) -> Answer | None:
        """None: the worker is full."""
        tokens: list[int] = []
        logprobs: list[float] = []
        first_s = last_s = 0.0
        start_s = time.perf_counter()
        async for response in self._stub.Generate(request, metadata=call_metadata(self._secret, request.request_id)):
            kind = response.WhichOneof("event")
            if kind == "stale":
                return None
            if kind == "tokens":
                last_s = time.perf_counter() - start_s
                first_s = first_s or last_s
                tokens += response.tokens.token_ids
                logprobs += [one.chosen.logprob for one in response.tokens.logprobs]
        return Answer(tuple(tokens), tuple(logprobs), first_s, last_s)

    def _request(
        self, prompt: Sequence[int], num_tokens: int, sampling: common_pb2.SamplingParams
    ) -> worker_pb2.WorkerGenerateRequest:
        key, identity = self._secret.block_key, self.identity
        root = block_root(
            key,
            model_digest=identity.model_digest,
            kv_dtype=identity.kv_dtype,
            layout_version=identity.layout_version,
            namespace=cache_namespace(tenant=_TENANT, generation=0, cache_salt=self._salt),
        )
        return worker_pb2.WorkerGenerateRequest(
            request_id=f"probe-{uuid.uuid4().hex}",
            attempt=1,
            model_digest=identity.model_digest,
            prompt_token_ids=prompt,
            block_root=root,
            prompt_block_ids=join_ids(chain_block_ids(key, root, prompt, identity.block_tokens)),
            owner_digest=owner_digest(key, tenant=_TENANT),
            sampling=sampling,
            num_choices=1,
            max_tokens=num_tokens,
            priority=common_pb2.PRIORITY_CLASS_INTERACTIVE,
        )


@asynccontextmanager
async def probing(address: str, secret: MeshSecret) -> AsyncIterator[ProbeClient]:
    """A client of the worker at `address`. Raises CliError when it does not say who it is."""
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        try:
            async with asyncio.timeout(_IDENTITY_TIMEOUT_S):
                watch = stub.Watch(worker_pb2.WatchRequest(), metadata=call_metadata(secret))
                identity = (await anext(aiter(watch))).identity
                watch.cancel()
        except (TimeoutError, grpc.aio.AioRpcError):
            raise CliError(f"the worker at {address} does not say who it is") from None
        yield ProbeClient(stub, identity, secret)
