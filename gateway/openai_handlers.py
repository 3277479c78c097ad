"""HTTP handlers of the OpenAI API, and of /tokenize and /detokenize, which go with it."""

from aiohttp import web

from .answering import Answering, json_answer
from .gateway import Gateway
from .middleware import request_id
from .openai.answers import Detokenized, Model, ModelList, Tokenized
from .openai.formats import ChatFormat, CompletionFormat
from .openai.logprobs import TokenSpeller


def openai_routes(gateway: Gateway) -> list[web.RouteDef]:
    """Bound to one gateway."""
    handlers = OpenAIHandlers(gateway)
    return [
        web.get("/v1/models", handlers.models),
        web.get("/v1/models/{model:.+}", handlers.model),
        web.post("/v1/completions", handlers.completions),
        web.post("/v1/chat/completions", handlers.chat_completions),
        web.post("/tokenize", handlers.tokenize),
        web.post("/detokenize", handlers.detokenize),
    ]


class OpenAIHandlers:
    """Bound to one gateway."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._answering = Answering(gateway)

    async def models(self, request: web.Request) -> web.StreamResponse:
        return json_answer(ModelList([self._model()]))

    async def model(self, request: web.Request) -> web.StreamResponse:
        self._gateway.parser.check_model(request.match_info["model"])
        return json_answer(self._model())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        timeline, parsed = await self._answering.receive(request, self._gateway.parser.completion)
        gateway = self._gateway
        answer_id = f"cmpl-{request_id(request)}"
        answer = CompletionFormat(answer_id, gateway.config.served_model, parsed, gateway.tokenizer)
        return await self._answering.answer(request, parsed, timeline, answer)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        timeline, parsed = await self._answering.receive(request, self._gateway.parser.chat)
        gateway = self._gateway
        answer_id = f"chatcmpl-{request_id(request)}"
        answer = ChatFormat(answer_id, gateway.config.served_model, parsed, gateway.tokenizer)
        return await self._answering.answer(request, parsed, timeline, answer)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        _, (source, wants_strings) = await self._answering.receive(request, self._gateway.parser.tokenize)
        limits = self._gateway.limits
        (token_ids,) = await self._gateway.prompts.encode(source, limits)
        speller = TokenSpeller(self._gateway.tokenizer, skip_special_tokens=False)
        strings = [speller.text(token_id) for token_id in token_ids] if wants_strings else None
        return json_answer(Tokenized(len(token_ids), limits.max_tokens, token_ids, strings))

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """Special tokens are shown, so that the text is the whole of what the ids say."""
        _, token_ids = await self._answering.receive(request, self._gateway.parser.detokenize)
        decode = self._gateway.tokenizer.decode
        text = await self._gateway.prompts.call(lambda: decode(token_ids, skip_special_tokens=False))
        return json_answer(Detokenized(text))

    def _model(self) -> Model:
        gateway = self._gateway
        return Model(gateway.config.served_model, gateway.started_at, gateway.limits.max_tokens, gateway.vocab_size)
