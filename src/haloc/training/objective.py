"""What is minimised: named terms, each already weighted, and the outputs that tell how many examples were right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haloc.errors import HalocError, ModelError, SpecError
from haloc.factor.forward import call, copied, describe
from haloc.training.settings import TrainSettings


@dataclass(frozen=True)
class Loss:
    """The terms of a loss; their sum is minimised.

    Attributes:
        terms: scalars by name, weighted.
        accuracy: share of the examples that were right, where the task has such a thing.
    """

    terms: Mapping[str, Tensor]
    accuracy: Tensor | None = None

    def __post_init__(self) -> None:
        taken = sorted({"loss", "accuracy"} & set(self.terms))
        if taken or not self.terms:
            raise SpecError(
                "a loss needs terms, none of them called 'loss' or 'accuracy': those are the sum of all terms and the "
                f"share of right answers; got {', '.join(self.terms) or 'none'}"
            )

    @property
    def total(self) -> Tensor:
        """The sum of the terms."""
        return total(self.terms)


#: ``(model, inputs, targets) -> Loss``.
Objective = Callable[[nn.Module, Any, Any], Loss]

#: A user's own: ``(model, batch) -> a scalar, or scalars by name``, of which the sum is minimised.
LossFunction = Callable[[nn.Module, Any], Tensor | Mapping[str, Tensor]]


#: Names of what is told besides the terms of a user's own loss.
_RESERVED = {"loss", "accuracy", "distillation", "features", "penalty"}


@dataclass(frozen=True)
class OwnLoss:
    """A user's own loss as an objective: it is handed the batch as the loader gave it, and calls the model itself."""

    function: LossFunction

    def __call__(self, model: nn.Module, batch: Any, targets: None = None) -> Loss:
        """Returns its terms; a scalar is the term "task"."""
        return Loss(self.terms(model, batch))

    def terms(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """What it says of a batch, by name."""
        try:
            said = self.function(model, batch)
        except HalocError:
            raise
        except Exception as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            raise ModelError(
                f"the loss {self.name} does not run on a batch of {describe(batch)}: {type(error).__name__}: {text}"
            ) from error
        terms = dict(said) if isinstance(said, Mapping) else {"task": said}
        self._check(terms)
        return {str(name): term.reshape(()) for name, term in terms.items()}

    @property
    def name(self) -> str:
        """Where the function is from and what it is called, to tell one from another in files."""
        owner = self.function if hasattr(self.function, "__qualname__") else type(self.function)
        return f"{owner.__module__}.{owner.__qualname__}"

    def _check(self, terms: Mapping[Any, Any]) -> None:
        taken = sorted(_RESERVED & set(terms))
        if taken or not terms:
            raise SpecError(
                f"the loss {self.name} must have terms, and none called {', '.join(sorted(_RESERVED))}, which are what "
                f"is told besides; got {', '.join(map(str, terms)) or 'none'}"
            )
        for name, term in terms.items():
            if not isinstance(term, Tensor) or term.numel() != 1:
                raise SpecError(
                    f"the loss {self.name} must return a tensor of one number, or a dict of names and such tensors; "
                    f"{name!r} is {describe(term)}: take the mean, and not item()"
                )
        if torch.is_grad_enabled() and not any(term.requires_grad for term in terms.values()):
            raise SpecError(f"what the loss {self.name} returns does not depend on the model's weights: no detach()")


def total(terms: Mapping[str, Tensor]) -> Tensor:
    """The sum of scalars, in float32."""
    return torch.stack([term.float() for term in terms.values()]).sum()


@dataclass(frozen=True)
class CrossEntropy:
    """Plain classification, with a share of the probability spread over all classes if so wished."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise SpecError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")

    def __call__(self, model: nn.Module, inputs: Any, targets: Tensor) -> Loss:
        """Returns the mean cross-entropy of the model's logits."""
        logits = logits_of(call(model, inputs))
        return Loss({"cross_entropy": cross_entropy(logits, targets, self.label_smoothing)}, accuracy(logits, targets))


def logits_of(outputs: Any) -> Tensor:
    """The logits themselves, or what is called so in an object or a dict."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs)
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy, computed in float32."""
    return F.cross_entropy(logits.float(), targets, label_smoothing=label_smoothing)


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """The share of the examples whose most likely class is right."""
    return (logits.detach().argmax(1) == targets).float().mean()


def distillation(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Hinton et al.: T² KL(softmax(teacher / T) ‖ softmax(student / T)), mean over the batch.

    The factor T² keeps the size of the gradients when T changes.
    """
    student = F.log_softmax(logits.float() / temperature, 1)
    teacher = F.log_softmax(teacher_logits.float() / temperature, 1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def feature_map_loss(maps: Iterable[Tensor], original: Iterable[Tensor]) -> Tensor:
    """The paper's L_approach: Σ_i MSE(Fmap_decomp,i, Fmap_org,i)."""
    # One by one, so that an iterator can let go of the original's maps on the way.
    differences = [own - other for own, other in zip(maps, original, strict=True)]
    loss: Tensor = _MeanSquares.apply(*differences)  # type: ignore[no-untyped-call]
    return loss


class _MeanSquares(torch.autograd.Function):
    """The sum of the mean squares of some tensors, in a few launches and little memory.

    Sums are in float32, but the tensors stay as they are: as float32 they would take twice the memory. On the way back
    they become their own gradients.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        norms = torch._foreach_norm(tensors, 2, torch.float32)
        return torch.stack(torch._foreach_mul(norms, [each.numel() ** -0.5 for each in tensors])).square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = ctx.saved_tensors
        # The factors are put together in float32 first: 2 / n alone would leave nothing of a float16.
        factors = torch._foreach_mul([grads[0]] * len(tensors), [2 / each.numel() for each in tensors])
        for tensor, factor in zip(tensors, factors, strict=True):
            tensor.mul_(factor)
        return tensors


@contextmanager
def recording(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Inside the block, what each named module put out at its last call is in the dict that this yields."""
    maps: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: maps.__setitem__(name, output)

    modules = {name: model.get_submodule(name) for name in names}  # before the first hook: a name may be wrong
    hooks = [module.register_forward_hook(keeper(name)) for name, module in modules.items()]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def onlooker(model: nn.Module, settings: TrainSettings) -> nn.Module:
    """A copy that answers and does not learn: a teacher, or the original of a factorised network."""
    still = copied(model).eval().requires_grad_(False)
    if settings.channels_last:
        still.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return still
