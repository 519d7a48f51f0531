"""Text sampled from the model while it is trained, through the pipeline that trains it.

For each token the stages run forward on all tokens so far, as one microbatch. The owner of the last stage
chooses the next token, which then goes to all ranks. There is no KV cache. So sampling works with any stage
and any number of ranks; it is meant for a few lines of text, not for serving.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from zbpp.runtime import Pipeline
from zbpp.runtime.parallel.mesh import TENSOR, whole_of
from zbpp.seeding import seed_of
from zbpp.training.optim.update import Metrics
from zbpp.training.trainer import Callback, Trainer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PADDING = 0  # any token will do: a causal model does not see later positions


class Coder(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """A token is a byte. Invalid UTF-8 decodes to the replacement character, a token above 255 to `<300>`."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        parts = [bytes([token]) if token < 256 else f"<{token}>".encode() for token in tokens]
        return b"".join(parts).decode(errors="replace")


class TokenizerFile:
    """The tokens of a Hugging Face tokenizer. begin: the token before each text (BOS), None: none."""

    def __init__(self, tokenizer: Tokenizer, begin: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._before = [] if begin is None else [begin]

    def encode(self, text: str) -> list[int]:
        return self._before + list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def generate(
    pipeline: Pipeline,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    window: int | None = None,
    ends: Collection[int] = (),
) -> list[int]:
    """The tokens that follow a prompt, equal on all ranks. Collective over the mesh.

    temperature: 0: always the likeliest token; else tokens are drawn with `seed`. window: how many of the
    last tokens the model sees; None: all. ends: tokens that end a text, such as EOS. Stage 0 gets int64
    [1, time], the last stage returns logits [1, time, vocabulary].
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_tokens):
        seen = tokens if window is None else tokens[-window:]
        output = pipeline.predict(*_inputs(pipeline, seen))
        mine = _chosen(output, len(seen), temperature, generator)
        tokens.append(next(each for each in pipeline.place.gather(mine) if each is not None))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def _inputs(pipeline: Pipeline, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """Stage 0's input: the tokens, padded to a multiple of the tensor-parallel degree; () on other ranks."""
    if 0 not in pipeline.stages:
        return ()
    missing = -len(tokens) % pipeline.place.size(TENSOR)
    return (torch.tensor([[*tokens, *[_PADDING] * missing]], device=pipeline.device),)


def _chosen(output: Any, length: int, temperature: float, generator: torch.Generator) -> int | None:
    """The token that follows the first `length` ones; None on ranks without the last stage."""
    if output is None:
        return None
    logits = whole_of(output)[0, length - 1].double().cpu()
    if not logits.isfinite().any():
        return _PADDING  # the run has diverged; the trainer reports that
    if temperature == 0:
        return int(logits.argmax())
    weights = (logits.nan_to_num(-torch.inf) / temperature).softmax(0)
    return int(torch.multinomial(weights, 1, generator=generator))


class Sampler(Callback):
    """Samples a text after every `every` steps. log(prompt, text, step): writes it; called on every rank."""

    def __init__(
        self,
        prompt: str,
        coder: Coder,
        *,
        every: int,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        window: int | None = None,
        ends: Collection[int] = (),
        log: Callable[[str, str, int], None],
    ) -> None:
        self._prompt, self._coder, self._every = prompt, coder, every
        self._tokens = coder.encode(prompt)
        self._max_tokens, self._temperature, self._seed, self._window = max_tokens, temperature, seed, window
        self._ends, self._log = ends, log

    def needs_weights(self, step: int) -> bool:
        """Whether text is sampled after this step."""
        return (step + 1) % self._every == 0

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Sample a text and write it."""
        if not self.needs_weights(step):
            return
        tokens = generate(
            trainer.pipeline,
            self._tokens,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            seed=seed_of(self._seed, "sample", step + 1),
            window=self._window,
            ends=self._ends,
        )
        self._log(self._prompt, self._coder.decode(tokens), step + 1)
