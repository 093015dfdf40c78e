"""The Transformer Engine backend, without a GPU: its recipes and signatures against TE's own
source, and its layer on a stand-in for TE's that keeps the rules the backend leans on."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fp8train.config import ConfigError
from fp8train.precision.backends.protocol import Job, replace
from fp8train.precision.backends.support import TABLE
from fp8train.precision.backends.transformer_engine import (
    QUESTIONS,
    SLOTS,
    DelayedHistories,
    Engine,
    Region,
    TransformerEngine,
    check_recipe,
    take_over,
    unavailable,
)
from fp8train.precision.plan import LayerPlan
from fp8train.precision.recipes import (
    ALL_E2M1,
    ALL_E4M3,
    HYBRID,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    NVFP4Scaling,
    Recipe,
)
from tests.ranks import on_ranks

E4M3 = ALL_E4M3


# --- TE's own source: the Python files of its wheel, which import nothing of CUDA -------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TE's Python files in a folder of their own."""
    folder = tmp_path_factory.mktemp("te")
    repo = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:"]
    command += ["--target", str(folder), "-c", str(repo / "constraints.txt"), "transformer-engine"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if result.returncode:
        pytest.skip(f"transformer-engine does not download: {result.stderr.strip()[-200:]}")
    return folder


RECIPES = """
import importlib, json, os
import transformer_engine.common.recipe as recipes
from fp8train.precision.backends.transformer_engine import te_recipe
from tests.precision.test_transformer_engine import MAPPED

def told(recipe):
    fields = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax",
              "x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
    facts = {field: getattr(recipe, field) for field in fields if hasattr(recipe, field)}
    roles = ("fwd_inp", "fwd_weight", "bwd_grad")
    names = [f"fp8_quant_{role}" for role in roles if hasattr(recipe, f"fp8_quant_{role}")]
    power_of_two = [getattr(recipe, name).power_2_scale for name in names]
    if hasattr(recipe, "fp4_quant_fwd_inp"):
        fp4 = [getattr(recipe, f"fp4_quant_{role}") for role in roles]
        facts["hadamard"] = [quantizer.random_hadamard_transform for quantizer in fp4]
        facts["stochastic"] = [quantizer.stochastic_rounding for quantizer in fp4]
        facts["square"] = [quantizer.fp4_2d_quantization for quantizer in fp4]
    for name in ("enable_2d_quantization", "row_scaled_activation", "nvfp4_4over6"):
        if getattr(recipe, name, None) not in (None, False, "none"):
            facts[name] = getattr(recipe, name)
    if getattr(recipe, "backward_override", None) is not None:
        facts["backward_override"] = recipe.backward_override
    return [type(recipe).__name__, recipe.fp8_format.name, power_of_two, facts]

for flag in "01":
    os.environ["NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"] = flag
    os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = flag
    for what in ("RHT", "STOCHASTIC_ROUNDING", "2D_QUANTIZATION"):
        os.environ["NVTE_NVFP4_DISABLE_" + what] = flag
    os.environ["NVTE_NVFP4_ROW_SCALED_ACTIVATION"] = flag
    os.environ["NVTE_NVFP4_4OVER6"] = ("none", "all")[int(flag)]
    importlib.reload(recipes)
    default = recipes.Float8CurrentScaling(), recipes.Float8BlockScaling()
    print(json.dumps([told(recipe)[2] for recipe in default]))
    print(json.dumps([told(te_recipe(recipe, recipes)) for recipe in MAPPED]))
"""
MAPPED: list[Recipe] = [
    DelayedScaling(HYBRID),
    DelayedScaling(E4M3, margin=2, history_length=16, amax_compute="most_recent"),
    CurrentScaling(HYBRID),
    CurrentScaling(E4M3, power_of_two=True),
    BlockScaling(E4M3),
    BlockScaling(HYBRID),
    BlockScaling(E4M3, power_of_two=False),
    MXScaling(),
    MXScaling(HYBRID),
    NVFP4Scaling(),
    NVFP4Scaling(hadamard=False, stochastic=frozenset()),
]
NVFP4 = {
    "hadamard": [True, False, True],
    "stochastic": [False, False, True],
    "square": [False, True, False],
}
PLAIN_NVFP4 = NVFP4 | {"hadamard": [False] * 3, "stochastic": [False] * 3}
BLOCKS = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}


def history(margin: int, length: int, algorithm: str) -> dict[str, Any]:
    return {
        "margin": margin,
        "amax_history_len": length,
        "amax_compute_algo": algorithm,
        "reduce_amax": True,
    }


@pytest.mark.slow
def test_recipes_in_transformer_engines_words(wheel: Path, repo: Path) -> None:
    """TE's environment variables change its defaults and not ours: the configuration decides."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{wheel}{os.pathsep}{repo}",
        "NVTE_PROJECT_BUILDING": "1",  # TE's recipes without its libraries
    }
    result = subprocess.run(
        [sys.executable, "-c", RECIPES], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    defaults, mapped, flipped, mapped_again = map(json.loads, result.stdout.splitlines())
    assert defaults == [[False] * 3, [True] * 3]
    assert flipped == [[True] * 3, [False] * 3]
    assert mapped == mapped_again
    assert mapped == [
        ["DelayedScaling", "HYBRID", [], history(0, 1024, "max")],
        ["DelayedScaling", "E4M3", [], history(2, 16, "most_recent")],
        ["Float8CurrentScaling", "HYBRID", [False] * 3, {}],
        ["Float8CurrentScaling", "E4M3", [True] * 3, {}],
        ["Float8BlockScaling", "E4M3", [True] * 3, BLOCKS],
        ["Float8BlockScaling", "HYBRID", [True] * 3, BLOCKS],
        ["Float8BlockScaling", "E4M3", [False] * 3, BLOCKS],
        ["MXFP8BlockScaling", "E4M3", [], {"margin": 0}],
        ["MXFP8BlockScaling", "HYBRID", [], {"margin": 0}],
        ["NVFP4BlockScaling", "E4M3", [], NVFP4],
        ["NVFP4BlockScaling", "E4M3", [], PLAIN_NVFP4],
    ]


def definition(file: Path, *path: str) -> Any:
    """The class or function at a dotted place of a source file."""
    node: Any = ast.parse(file.read_text())
    for name in path:
        node = next(child for child in node.body if getattr(child, "name", None) == name)
    return node


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


@pytest.mark.slow
def test_the_calls_that_we_make_exist(wheel: Path) -> None:
    """Names and places that the stand-in below can't vouch for."""
    te = wheel / "transformer_engine" / "pytorch"
    linear = parameters(definition(te / "module" / "linear.py", "Linear", "__init__"))
    assert linear[1:3] == ["in_features", "out_features"]
    assert {"bias", "device"} < set(linear)
    assert parameters(definition(te / "module" / "linear.py", "Linear", "forward"))[1] == "inp"
    base = te / "module" / "base.py"
    metadata = definition(base, "TransformerEngineBaseModule", "init_fp8_metadata")
    assert len(parameters(metadata)) - 1 == len(metadata.args.defaults)
    quantization = te / "quantization.py"
    autocast = definition(quantization, "autocast", "__init__")
    assert {"enabled", "recipe"} < set(parameters(autocast))
    for name in set(QUESTIONS.values()):
        assert parameters(definition(quantization, name)) == ["return_reason"]
    exported = (te / "__init__.py").read_text()
    for name in ("Linear", "autocast", *QUESTIONS.values()):
        assert f"import {name}\n" in exported
    roles = ast.unparse(definition(te / "module" / "linear.py", "Linear", "get_quantizer_roles"))
    forward, backward = (part.split("]")[0] for part in roles.split("base = [")[1:])
    for part, key in ((forward, "scaling_fwd"), (backward, "scaling_bwd")):
        columns = {role: column for role, (held, column) in SLOTS.items() if held == key}
        assert (
            dict(zip(re.findall(r"tensor_type='(\w+)'", part), range(3), strict=False)) == columns
        )


@pytest.mark.slow
def test_an_installation_without_its_libraries_is_refused_in_one_line(
    wheel: Path, repo: Path
) -> None:
    code = """
from fp8train.config import ConfigError
from fp8train.precision.backends.transformer_engine import Engine
try:
    Engine.load()
except ConfigError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": f"{wheel}{os.pathsep}{repo}"}
    environment.pop("NVTE_PROJECT_BUILDING", None)
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    (line,) = result.stdout.splitlines()
    assert line.startswith("precision.backend=transformer_engine: Transformer Engine does not")
    assert "RuntimeError" in line
    assert line.endswith("or use precision.backend=emulated")


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        (CurrentScaling(HYBRID, margin=1), "precision.margin=1"),
        (BlockScaling(E4M3, margin=-2), "precision.margin=-2"),
        (MXScaling(margin=1), "precision.margin=1"),
        (NVFP4Scaling(margin=1), "precision.margin=1"),
        (DelayedScaling(HYBRID, power_of_two=True), "precision.power_of_two_scales=true"),
        (MXScaling(stochastic=frozenset({"input"})), "precision.stochastic_rounding=['input']"),
        (
            NVFP4Scaling(stochastic=frozenset({"input", "grad_output"})),
            "precision.stochastic_rounding=['grad_output', 'input']",
        ),
        (CurrentScaling(ALL_E2M1), "precision.formats: "),
        (NVFP4Scaling(ALL_E4M3), "precision.formats: "),
    ],
)
def test_options_that_transformer_engine_lacks(recipe: Recipe, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_recipe("fp8_current", recipe)
    message = str(error.value)
    assert message.startswith(key)
    assert "precision.backend=emulated" in message
    assert "\n" not in message


def test_options_that_transformer_engine_has() -> None:
    for recipe in MAPPED:
        check_recipe("fp8_current", recipe)
    assert set(QUESTIONS) == set(TABLE["transformer_engine"])


NO_FP8 = "Device compute capability 8.9 or higher required for FP8 execution."
NO_BLOCKS = "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."


def test_transformer_engines_own_word_on_the_gpu() -> None:
    """Its questions, answered as on an Ada GPU."""
    answers = {
        "is_fp8_available": (True, ""),
        "is_fp8_block_scaling_available": (False, NO_BLOCKS),
        "is_mxfp8_available": (False, NO_FP8),
        "is_nvfp4_available": (True, ""),
    }

    def question(name: str) -> Callable[..., tuple[bool, str]]:
        return lambda return_reason: answers[name]

    te = SimpleNamespace(**{name: question(name) for name in answers})
    assert unavailable(Engine(te, FakeRecipes)) == {"fp8_block": NO_BLOCKS, "mxfp8": NO_FP8}


def test_a_size_that_fp8_gemms_do_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.up is 24×16, .* multiples of 16"):
        take_over("layers.0.up", nn.Linear(16, 24), Region(CurrentScaling(HYBRID), fake_engine()))
    take_over("layers.0.up", nn.Linear(16, 48), Region(NVFP4Scaling(), fake_engine()))
    with pytest.raises(ConfigError, match=r"layers\.0\.up is 48×16, .* multiples of 32"):
        take_over("layers.0.up", nn.Linear(16, 48), Region(MXScaling(), fake_engine()))


# --- the layer, on a stand-in for TE ----------------------------------------------------------


class FakeRecipes:
    """Just enough of TE's recipes to be told apart."""

    Format = dict.fromkeys(("HYBRID", "E4M3"))
    DelayedScaling = staticmethod(lambda **options: SimpleNamespace(delayed=True))
    Float8CurrentScaling = staticmethod(lambda **options: SimpleNamespace(delayed=False))
    Float8BlockScaling = staticmethod(lambda **options: SimpleNamespace(delayed=False))
    MXFP8BlockScaling = staticmethod(lambda **options: SimpleNamespace(delayed=False))
    NVFP4BlockScaling = staticmethod(lambda **options: SimpleNamespace(delayed=False))
    QParams = staticmethod(lambda **options: SimpleNamespace(**options))


class State:
    """The state that TE keeps globally."""

    depth = 0
    recipe: Any = None
    first = False  # whether the next layer is the forward's first: it reduces in backward
    forward_updates = 0
    backward_updates = 0
    inputs: list[tuple[torch.Size, torch.dtype, type]] = []  # noqa: RUF012


class FakeAutocast:
    """TE's order of events, also the part that makes nested regions costly."""

    def __init__(self, enabled: bool = True, recipe: Any = None) -> None:
        self.recipe = recipe

    def __enter__(self) -> None:
        self.before = State.recipe, State.first
        State.recipe = self.recipe
        if State.depth == 0:
            State.first = True
        State.depth += 1

    def __exit__(self, *error: Any) -> None:
        State.recipe, State.first = self.before
        State.depth -= 1
        if State.depth == 0 and torch.is_grad_enabled():
            State.forward_updates += 1


class CountBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        State.backward_updates += 1
        return gradient


class FakeLinear(nn.Module):
    """TE's linear where the backend meets it: parameters, metadata, extra state, dtype check."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: str = "cuda"
    ) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self.use_bias = bias
        weight = torch.empty(out_features, in_features, device=device)
        self.register_parameter("weight", nn.Parameter(weight), init_fn=None)
        if bias:
            self.register_parameter(
                "bias", nn.Parameter(torch.empty(out_features, device=device)), init_fn=None
            )
        else:
            self.bias = torch.Tensor().to(device)

    def register_parameter(self, name: str, param: nn.Parameter | None, **kwargs: Any) -> None:
        super().register_parameter(name, param)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        raise RuntimeError("Refusing to load pickled Transformer Engine extra state")

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        assert State.recipe is not None
        if State.recipe.delayed and not self.fp8_meta:
            for key, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                self.fp8_meta[key] = SimpleNamespace(
                    scale=torch.ones(columns), amax_history=torch.zeros(4, columns)
                )

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        assert State.recipe is not None, "a forward outside of autocast runs in high precision"
        self.init_fp8_metadata()
        weight = self.weight
        assert weight.dtype == inp.dtype
        State.inputs.append((weight.shape, weight.dtype, type(weight)))
        if State.first and inp.requires_grad:
            State.first = False
            inp = CountBackward.apply(inp)
        return F.linear(inp, weight, self.bias if self.use_bias else None)


def fake_engine() -> Engine:
    State.depth = State.forward_updates = State.backward_updates = 0
    State.recipe, State.first, State.inputs = None, False, []
    return Engine(SimpleNamespace(Linear=FakeLinear, autocast=FakeAutocast), FakeRecipes)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.mlp = nn.ModuleDict(
            {"up_proj": nn.Linear(32, 64, bias=False), "down_proj": nn.Linear(64, 32)}
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp["down_proj"](self.mlp["up_proj"](self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def swap(model: nn.Module, region: Region) -> dict[str, nn.Module]:
    swapped = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.startswith("layers"):
            swapped[name] = take_over(name, module, region)
            replace(model, name, swapped[name])
    region.span(model)
    return swapped


def train(change: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Two sharded steps of accumulation of a model made on the meta device and then changed."""
    with torch.device("meta"):
        model = Model()
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    originals = dict(model.named_parameters())
    change(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert all(parameter is originals[name] for name, parameter in model.named_parameters())
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters()):
        assert isinstance(parameter, DTensor)
        shard = parameter.to_local()
        generator = torch.Generator().manual_seed(100 * index + mesh.get_local_rank())
        with torch.no_grad():
            shard.copy_(torch.randn(shard.shape, generator=generator) / 8)
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    for _ in range(2):
        logits = model(torch.randint(16, (2, 8), generator=generator))
        upstream = torch.randn(logits.shape, generator=generator)
        (logits * upstream).sum().backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert list(model.state_dict()) == keys
    model.eval()
    with torch.no_grad():
        logits = model(torch.arange(16).view(2, 8))
    return {"gradients": gradients, "logits": logits}


def train_both() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The same training with torch's linears and with the stand-in's; what the latter saw."""
    plain = train(lambda model: None)
    region = Region(DelayedScaling(HYBRID), fake_engine())
    ours = train(lambda model: swap(model, region))
    seen = {
        "weights": set(State.inputs),
        "calls": len(State.inputs),
        "forward_updates": State.forward_updates,
        "backward_updates": State.backward_updates,
        "depth": (State.depth, region.depth),
    }
    return plain, ours, seen


def test_the_layer_trains_sharded_as_torchs_does() -> None:
    for plain, ours, seen in on_ranks(2, train_both):
        assert torch.equal(ours["logits"], plain["logits"])
        assert ours["logits"].dtype == torch.bfloat16
        for name, gradient in plain["gradients"].items():
            assert gradient.abs().max() > 0, name
            assert torch.equal(ours["gradients"][name], gradient), name
        assert seen["calls"] == 6 * 3
        # TE saw whole BF16 parameters, not shards.
        assert seen["weights"] == {
            ((64, 32), torch.bfloat16, nn.Parameter),
            ((32, 64), torch.bfloat16, nn.Parameter),
        }
        # One update of the scales a forward and one a backward; none in evaluation.
        assert (seen["forward_updates"], seen["backward_updates"]) == (2, 2)
        assert seen["depth"] == (0, 0)


def test_a_layer_alone_enters_the_region_itself() -> None:
    region = Region(CurrentScaling(HYBRID), fake_engine())
    plain = nn.Linear(32, 64)
    layer = take_over("up", plain, region)
    assert layer.weight is plain.weight
    assert layer.bias is plain.bias
    x = torch.randn(2, 3, 32)
    assert torch.equal(layer(x), plain(x))
    assert type(layer) is type(take_over("down", nn.Linear(64, 32, bias=False), region))
    assert State.depth == 0


@pytest.mark.parametrize("recipe", [DelayedScaling(), MXScaling()])
def test_the_backend_installs_its_layers(recipe: Recipe) -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    names = [name for name, module in model.named_modules() if name.endswith("_proj")]
    job = Job(model, {name: LayerPlan("x", recipe) for name in names}, torch.device("cpu"))
    installed = TransformerEngine(fake_engine()).install(job)
    assert all(isinstance(model.get_submodule(name), FakeLinear) for name in names)
    assert isinstance(installed.delayed, DelayedHistories) == isinstance(recipe, DelayedScaling)
    assert installed.numerics == {}
    tokens = torch.randint(16, (2, 8))
    assert torch.equal(model(tokens), plain(tokens))
    assert State.forward_updates == 1  # one region around the whole forward
    if installed.delayed is not None:
        assert len(installed.delayed.state_dict()) == 2 * 3 * len(names)


def test_a_failed_forward_leaves_the_region() -> None:
    model = Model()
    region = Region(CurrentScaling(HYBRID), fake_engine())
    swap(model, region)
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    assert (region.depth, State.depth) == (0, 0)
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 16)


def test_amax_histories_survive_a_checkpoint(tmp_path: Path) -> None:
    def histories() -> tuple[DelayedHistories, dict[str, Any]]:
        region = Region(DelayedScaling(HYBRID), fake_engine())
        layers: dict[str, Any] = swap(Model(), region)
        return DelayedHistories(layers, region), layers

    saved, layers = histories()
    state = saved.state_dict()
    assert State.forward_updates == 0
    name = "layers.1.mlp.up_proj"
    for index, (key, column) in enumerate(SLOTS.values(), 1):
        layers[name].fp8_meta[key].amax_history[:, column] = torch.arange(4) * index
        layers[name].fp8_meta[key].scale[column] = 100 * index
    dcp.save({"delayed": state}, checkpoint_id=tmp_path, no_dist=True)

    loaded, layers = histories()
    dcp.load({"delayed": loaded.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    forward, backward = (layers[name].fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd"))
    assert forward.amax_history.T.tolist() == [[0, 1, 2, 3], [0, 2, 4, 6], [0, 0, 0, 0]]
    assert backward.amax_history.T.tolist() == [[0, 3, 6, 9], [0, 0, 0, 0]]
    assert forward.scale.tolist() == [100, 200, 1]
    assert backward.scale.tolist() == [300, 1]
    loaded.roll()
    loaded.discard()
    assert forward.scale.tolist() == [100, 200, 1]
