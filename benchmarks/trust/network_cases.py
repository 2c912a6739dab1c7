"""Strange networks: what people write that is not a row of layers in a Sequential."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune


def rows(batch: int = 2, size: int = 16) -> Tensor:
    """Inputs of a linear layer."""
    return torch.randn(batch, size)


def images(batch: int = 2, channels: int = 8, extent: int = 6) -> Tensor:
    """Inputs of a convolution."""
    return torch.randn(batch, channels, extent, extent)


class Run(nn.Module):
    """Modules by name, and a function that says how they are run."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.how = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs them so."""
        return self.how(self, *args, **kwargs)


def fc(size: int = 16) -> nn.Linear:
    """A layer that can be factorised."""
    return nn.Linear(size, size)


def conv(**options: Any) -> nn.Conv2d:
    """Another."""
    return nn.Conv2d(8, 8, 3, **({"padding": 1} | options))


def twice() -> tuple[nn.Module, Any]:
    return Run(lambda m, x: m.fc(torch.relu(m.fc(x))), fc=fc()), rows()


def two_names() -> tuple[nn.Module, Any]:
    shared = fc()
    return nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)), rows()


def tied_layers() -> tuple[nn.Module, Any]:
    model = nn.Sequential(fc(), nn.ReLU(), fc(), fc())
    model[2].weight = model[0].weight
    return model, rows()


def tied_embedding() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False))
    model[1].weight = model[0].weight
    return model, torch.randint(0, 32, (2, 5))


def tied_views() -> tuple[nn.Module, Any]:
    """Two parameters, one memory: nothing but the address tells."""
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    model[2].weight = nn.Parameter(model[0].weight.detach())
    return model, rows()


def two_resolutions() -> tuple[nn.Module, Any]:
    return Run(lambda m, x: m.conv(F.max_pool2d(m.conv(x), 2)), conv=conv()), images()


def branches() -> tuple[nn.Module, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.usual(x) if x.shape[0] < 100 else m.rare(x)

    return Run(forward, usual=fc(), rare=fc()), rows()


class Steps(nn.Module):
    """Keeps its layers as ``keep`` says, besides as modules."""

    def __init__(self, keep: Callable[[nn.Linear], Any], use: Callable[[Any], Any], register: bool = True) -> None:
        super().__init__()
        first, second = fc(), fc()
        self.other = second
        if register:
            self.first = first
        self.kept, self.use = keep(first), use

    def forward(self, x: Tensor) -> Any:
        """Calls the one that is kept."""
        return self.other(torch.relu(self.use(self.kept)(x)))


def listed_only() -> tuple[nn.Module, Any]:
    return Steps(lambda layer: [layer], lambda kept: kept[0], register=False), rows()


def listed_too() -> tuple[nn.Module, Any]:
    return Steps(lambda layer: [layer], lambda kept: kept[0]), rows()


def listed_in_a_block() -> tuple[nn.Module, Any]:
    """The block in the list is nobody's module, the layer in it is."""
    return Steps(lambda layer: [nn.Sequential(layer, nn.ReLU())], lambda kept: kept[0]), rows()


def nested_list() -> tuple[nn.Module, Any]:
    return Steps(lambda layer: {"a": [(layer,)]}, lambda kept: kept["a"][0][0]), rows()


def bound_method() -> tuple[nn.Module, Any]:
    return Steps(lambda layer: layer.forward, lambda kept: kept), rows()


def partial_call() -> tuple[nn.Module, Any]:
    return Steps(lambda layer: functools.partial(layer), lambda kept: kept), rows()


class Helper:
    """Not a module, and holds one."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


def helper_object() -> tuple[nn.Module, Any]:
    return Steps(Helper, lambda kept: kept.layer), rows()


def closure() -> tuple[nn.Module, Any]:
    """A copy of the model shares the function, which goes on calling the layers of the original."""
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    model.forward = lambda x: model[2](model[1](model[0](x)))
    return model, rows()


def functional() -> tuple[nn.Module, Any]:
    return Run(lambda m, x: F.conv2d(x, m.conv.weight, m.conv.bias, padding=1), conv=conv()), images()


def hand_norm() -> tuple[nn.Module, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(x) / m.fc.weight.norm()

    return Run(forward, fc=fc(), other=fc()), rows()


def hooked() -> tuple[nn.Module, Any]:
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model, rows()


def hook_reads_weight() -> tuple[nn.Module, Any]:
    model = nn.Sequential(fc())
    model[0].register_forward_hook(lambda module, args, output: output + module.weight.sum())
    return model, rows()


class Scaled(nn.Conv2d):
    """A convolution with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice as much."""
        return super().forward(x) * 2


class Renamed(nn.Conv2d):
    """A convolution by another name."""


def lazy() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.LazyConv2d(8, 3)), images()


def quantised() -> tuple[nn.Module, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(fc(), nn.ReLU()), {nn.Linear}, dtype=torch.qint8)
    return model, rows()


def old_style(wrap: Callable[..., nn.Module]) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.Sequential(wrap(fc()), nn.ReLU(), fc()), rows()

    return make


class Symmetric(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        """The symmetric part."""
        return (weight + weight.mT) / 2


def parametrised() -> tuple[nn.Module, Any]:
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model, rows()


def parametrised_bias() -> tuple[nn.Module, Any]:
    """The weight is plain, the bias is not."""
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    parametrize.register_parametrization(model[0], "bias", nn.Tanh())
    return model, rows()


def pruned() -> tuple[nn.Module, Any]:
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model, rows()


def pruned_bias() -> tuple[nn.Module, Any]:
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    prune.l1_unstructured(model[0], "bias", amount=0.5)
    return model, rows()


class Lora(nn.Module):
    """What adapters do to a layer, written by hand."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer and its adapter."""
        return self.base(x) + self.up(self.down(x))


def peft_lora() -> tuple[nn.Module, Any]:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    return peft.get_peft_model(nn.Sequential(fc(), nn.ReLU(), fc()), config), rows()


def attention() -> tuple[nn.Module, Any]:
    x = torch.randn(2, 5, 16)
    return nn.MultiheadAttention(16, 4, batch_first=True), (x, x, x)


def encoder() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.Sequential(layer, nn.Linear(16, 16)), torch.randn(2, 5, 16)


def lstm() -> tuple[nn.Module, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(m.lstm(x)[0])

    return Run(forward, lstm=nn.LSTM(16, 16, batch_first=True), fc=fc()), torch.randn(2, 5, 16)


@dataclass
class ModelOutput:
    """What libraries return."""

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


def output(make: Callable[[Tensor, Tensor], Any]) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        def forward(m: Any, x: Tensor) -> Any:
            hidden = torch.relu(m.body(x))
            return make(m.head(hidden), hidden)

        return Run(forward, body=fc(), head=fc()), rows()

    return build


def huggingface() -> tuple[nn.Module, Any]:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return output(lambda logits, hidden: SequenceClassifierOutput(logits=logits, hidden_states=(hidden,)))()


class Named(nn.Module):
    """Takes named arguments, and a nest."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = fc()

    def forward(self, x: Tensor, extra: dict[str, Tensor] | None = None, *, scale: Tensor | None = None) -> Tensor:
        """Adds up what there is."""
        y = x if extra is None else x + extra["a"]
        return self.fc(y) if scale is None else self.fc(y) * scale


def nested_inputs() -> tuple[nn.Module, Any]:
    return Named(), (rows(), {"a": rows()})


def named_inputs() -> tuple[nn.Module, Any]:
    return Named(), {"x": rows(), "scale": torch.tensor(2.0)}


class Counter(nn.Module):
    """Counts its runs in a buffer, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = fc()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Counts."""
        self.runs += 1
        return self.fc(x)


class Modes(nn.Module):
    """Is another network in training than in use."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.aux = fc(), fc()

    def forward(self, x: Tensor) -> Any:
        """Two outputs in training, one otherwise."""
        return (self.fc(x), self.aux(x)) if self.training else self.fc(x)


def in_place() -> tuple[nn.Module, Any]:
    return Run(lambda m, x: m.b(F.relu_(m.a(x))).mul_(2), a=fc(), b=fc()), rows()


def random_forward() -> tuple[nn.Module, Any]:
    return Run(lambda m, x: m.fc(x + 0.1 * torch.rand_like(x)), fc=fc()), rows()


def batchnorm_of_one() -> tuple[nn.Module, Any]:
    return nn.Sequential(conv(bias=False), nn.BatchNorm2d(8), nn.ReLU(), conv()).train(), images(1)


def batchnorm_of_one_value() -> tuple[nn.Module, Any]:
    """One example and one position: there is no variance to normalise by."""
    return nn.Sequential(fc(), nn.BatchNorm1d(16), nn.ReLU(), fc()).train(), rows(1)


def compiled() -> tuple[nn.Module, Any]:
    return torch.compile(nn.Sequential(fc(), nn.ReLU(), fc()), backend="eager"), rows()


def distributed() -> tuple[nn.Module, Any]:
    """DDP of one process; the group is made once."""
    import tempfile

    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(tempfile.mkstemp()[1], 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(nn.Sequential(fc(), nn.ReLU(), fc())), rows()


def graph_module() -> tuple[nn.Module, Any]:
    return torch.fx.symbolic_trace(nn.Sequential(fc(), nn.ReLU(), fc())), rows()


def exported_program() -> tuple[nn.Module, Any]:
    program = torch.export.export(nn.Sequential(fc(), nn.ReLU(), fc()).eval(), (rows(),))
    return program.module(), rows()


def meta() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return nn.Sequential(fc(), nn.ReLU(), fc()), rows()


def meta_with_data() -> tuple[nn.Module, Any]:
    """The model is on the meta device, the inputs are not."""
    with torch.device("meta"):
        model = nn.Sequential(fc(), nn.ReLU(), fc())
    return model, rows()


def frozen() -> tuple[nn.Module, Any]:
    model = nn.Sequential(fc(), nn.ReLU(), fc())
    model[0].requires_grad_(False)
    return model, rows()


def chain(*modules: Callable[[], nn.Module], inputs: Callable[[], Any] = rows) -> Callable[[], tuple[nn.Module, Any]]:
    """A row of modules, made anew each time."""
    return lambda: (nn.Sequential(*(make() for make in modules)), inputs())


def one_conv(kind: Callable[..., nn.Module] = conv, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    """One convolution with options."""
    return lambda: (nn.Sequential(kind(**options)), images())


def whole_numbers() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Embedding(9, 16), fc()), torch.randint(0, 9, (2, 5))


def scripted() -> tuple[nn.Module, Any]:
    return torch.jit.script(nn.Sequential(fc(), nn.ReLU(), fc())), rows()


def traced() -> tuple[nn.Module, Any]:
    return torch.jit.trace(nn.Sequential(fc(), nn.ReLU(), fc()), rows()), rows()


def modes() -> tuple[nn.Module, Any]:
    return Modes(), rows()
