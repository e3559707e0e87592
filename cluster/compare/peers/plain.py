"""What one writes in an afternoon: transformers' `generate` behind a Ray Serve deployment.

Here to be compared with: nothing is batched, no prompt is cached, nothing is queued by rank. It
speaks as much of OpenAI's API as a load client needs: models, chat and completions, streamed or
whole, `ignore_eos`, usage.
"""

# No `from __future__ import annotations` here: Serve reads the builder's annotations as classes.
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from ray import serve

api = FastAPI()


class PlainArgs(BaseModel):
    """`args` of the application."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    directory: str
    """As `from_pretrained` wants it."""

    dtype: str = "bfloat16"
    threads: int = Field(default=1, ge=1)


@serve.deployment
@serve.ingress(api)
class Plain:
    def __init__(self, args: PlainArgs) -> None:
        from cluster.compare.peers.answers import Answers

        self._name = args.name
        self._answers = Answers(args.name, args.directory, args.dtype, args.threads)

    @api.get("/v1/models")
    def models(self) -> dict[str, Any]:
        length = self._answers.max_context_tokens
        model = {"id": self._name, "object": "model", "max_model_len": length}
        return {"object": "list", "data": [model]}

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return await self._answers.completion(await request.json())

    @api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        return await self._answers.chat(await request.json())


def build(args: PlainArgs) -> serve.Application:
    """For `import_path`."""
    deployment: Any = Plain  # the decorators' types hide what they make
    return deployment.bind(args)
