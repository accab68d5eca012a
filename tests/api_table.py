"""Write the tables of the public interface in docs: ``python -m tests.api_table``.

For each call of the interface docs/api.md shows the signature, and a test that uses it: of the
functions in `tests` that do, the one whose name and whose other calls fit best. For each registered
strategy docs/compression.md shows the first line of its docstring, and the sources that it cites.
docs/reference/environment.md shows the settings.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hvdlite.base.settings import SAME_EVERYWHERE, Settings
from hvdlite.compression import Compression, Strategy
from hvdlite.engine.process_sets import global_process_set
from hvdlite.launch import options
from tests.compression.strategies import REGISTERED

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "api.md"
STRATEGIES = ROOT / "docs" / "compression.md"
ENVIRONMENT = ROOT / "docs" / "reference" / "environment.md"
# On a page: all else is written by hand.
_GENERATED = re.compile(r"(?<=<!-- from the code -->\n).*?(?=\n<!-- end -->)", re.DOTALL)

# Modules that have names of the interface; the tests of any Keras have its adapter from the latter.
_OF_INTEREST = "hvdlite", "tests.keras.models"
# Holds every registered strategy to the same laws.
_LAWS = "tests/compression/test_laws.py::test_no_more_than_two_buckets"

# For each module: a heading, and its calls. A name with a dot is a method or an attribute.
SECTIONS: list[tuple[str, str, str]] = [
    (
        "hvdlite",
        "Everywhere",
        """init shutdown is_initialized rank size local_rank local_size cross_rank cross_size
        virtual_rank virtual_size is_homogeneous mpi_threads_supported mpi_enabled mpi_built
        gloo_enabled gloo_built
        nccl_built ddl_built ccl_built cuda_built rocm_built Average Sum Adasum Min Max Product
        ProcessSet ProcessSet.process_set_id ProcessSet.ranks ProcessSet.size ProcessSet.rank
        ProcessSet.included global_process_set add_process_set remove_process_set start_timeline
        stop_timeline traffic run spawn HorovodInternalError HostsUpdatedInterrupt
        HostsUpdatedInterrupt.skip_sync shard Sharding Sharding.position Sharding.at lockstep
        scale_lr warmup checkpoint average_metrics sum_metrics gather first on_rank_zero seed
        progress allreduce allreduce_async grouped_allreduce grouped_allreduce_async
        allgather allgather_async grouped_allgather grouped_allgather_async broadcast
        broadcast_async alltoall alltoall_async
        reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
        broadcast_object allgather_object join barrier poll synchronize""",
    ),
    (
        "hvdlite.torch",
        "PyTorch",
        """allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce
        grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async
        allgather allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_
        broadcast_async broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
        grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize
        broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object
        DistributedOptimizer DistributedOptimizer.synchronize DistributedOptimizer.skip_synchronize
        DistributedOptimizer.clip_grad_norm_
        DistributedOptimizer.set_backward_passes_per_step DistributedOptimizer.zero_grad
        DistributedOptimizer.average_weights DistributedOptimizer.stepped
        DistributedOptimizer._parameter_names SyncBatchNorm
        DistributedOptimizer.consolidate_exchange_state
        convert_sync_batchnorm SyncBatchNorm.convert_sync_batchnorm comm_hook comm_hook_state
        ShardSampler ShardSampler.state_dict ShardSampler.load_state_dict ShardStream
        pin_device checkpoint summary_writer""",
    ),
    (
        "hvdlite",
        "How and when gradients travel (in every adapter)",
        f"""Compression {" ".join(f"Compression.{name}" for name in REGISTERED)}
        Schedule Schedule.EveryStep Schedule.Accumulate Schedule.PartialSync Schedule.LocalSGD
        Schedule.DiLoCo singa advise""",
    ),
    (
        "hvdlite.torch.elastic",
        "PyTorch, elastic",
        """run State ObjectState TorchState TorchState.commit TorchState.restore TorchState.save
        TorchState.sync TorchState.check_host_updates TorchState.register_reset_callbacks
        ElasticSampler ElasticSampler.set_epoch ElasticSampler.record_batch
        ElasticSampler.state_dict ElasticSampler.load_state_dict""",
    ),
    (
        "hvdlite.tensorflow",
        "TensorFlow",
        """allreduce grouped_allreduce allgather grouped_allgather broadcast broadcast_ alltoall
        reducescatter grouped_reducescatter join barrier rank_op size_op local_rank_op local_size_op
        process_set_included_op broadcast_variables broadcast_object broadcast_object_fn
        allgather_object SyncBatchNormalization DistributedGradientTape
        DistributedGradientTape.gradient DistributedGradientTape.end_step
        DistributedGradientTape.average_weights DistributedGradientTape.register_local_source
        PartialDistributedGradientTape
        exchange_state_dict load_exchange_state_dict consolidate_exchange_state
        DistributedOptimizer broadcast_global_variables
        BroadcastGlobalVariablesHook pin_device shard sharded checkpoint summary_writer""",
    ),
    (
        "hvdlite.tensorflow.elastic",
        "TensorFlow, elastic",
        "run TensorFlowState TensorFlowKerasState",
    ),
    (
        "hvdlite.keras",
        "Keras 3, and `hvdlite.tensorflow.keras` for `tf.keras`",
        """DistributedOptimizer PartialDistributedOptimizer allreduce allgather broadcast
        reducescatter broadcast_global_variables load_model summary_writer""",
    ),
    (
        "hvdlite.keras.callbacks",
        "Keras, callbacks",
        """BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback
        LearningRateWarmupCallback BestModelCheckpoint""",
    ),
    (
        "hvdlite.keras.elastic",
        "Keras, elastic",
        "KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback",
    ),
]


# Where tests of a module are, if not in a folder of its name.
_PLACES = {
    "hvdlite.torch.elastic": "elastic",
    "hvdlite.tensorflow.elastic": "elastic",
    "hvdlite.keras.elastic": "elastic",
    "hvdlite.keras.callbacks": "keras",
}


@dataclass(frozen=True)
class Function:
    """A function of a test file, with what it calls in the same file."""

    label: str  # where it is
    imports: tuple[tuple[str, str], ...]  # of hvdlite, in the file: the name there, and its own
    text: str  # its source, and that of its file's functions that it calls
    words: frozenset[str]  # of the text: they tell faster than a search what does not occur in it


def table() -> str:
    """Return the text of docs/api.md."""
    lines = []
    for module, heading, names in SECTIONS:
        lines += [f"## {heading}: `{module}`", "", "| call | signature | test |", "|---|---|---|"]
        for name in names.split():
            row = (f"`{name}`", f"`{signature(module, name)}`", f"`{covering_test(module, name)}`")
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    return _filled(TABLE, lines[:-1])


def environment() -> str:
    """Return the text of docs/reference/environment.md."""
    return _filled(ENVIRONMENT, _settings())


def about_strategies() -> str:
    """Return the text of docs/compression.md."""
    return _filled(STRATEGIES, _strategies())


def _filled(page: Path, lines: Iterable[str]) -> str:
    return _GENERATED.sub(lambda _: "\n".join(lines), page.read_text())


def _strategies() -> Iterator[str]:
    """Yield a table of the registered strategies, by lines."""
    yield "| `hvd.Compression.` | | source |\n|---|---|---|"
    for name, found in vars(Compression).items():
        kind = found if isinstance(found, type) else type(found)
        if issubclass(kind, Strategy):
            call = ""
            if kind is found:
                call = f"({', '.join(inspect.signature(found).parameters)})"
            text = kind.__doc__ or ""
            sources = ", ".join(re.findall(r"arXiv:\d+\.\d+", text))
            yield f"| `{name}{call}` | {text.splitlines()[0]} | {sources} |"


def _settings() -> Iterator[str]:
    """Yield a table of the settings, by lines; a meaning is the comment above a setting."""
    yield "| variable and default | allowed | meaning | `hvdliterun` |\n|---|---|---|---|"
    source = inspect.getsource(Settings)
    flags = {setting: f"`--{name.replace('_', '-')}`" for name, setting in options.SETTINGS.items()}
    flags |= {"TIMELINE": "`--timeline-filename`", "STALL_CHECK_DISABLE": "`--no-stall-check`"}
    for entry in dataclasses.fields(Settings):
        if entry.metadata:
            above = re.search(rf"((?: *#: .*\n)+) *{entry.name}:", source)
            meaning = " ".join(re.findall("#: (.*)", above[1]))
            default = int(entry.default) if entry.type == "bool" else entry.default
            variable = f"`HVDLITE_{entry.name.upper()}={default}`"
            if entry.name in SAME_EVERYWHERE:
                variable += " *"
            option = flags.get(entry.name.upper(), "")
            yield f"| {variable} | {entry.metadata['allowed']} | {meaning} | {option} |"


def signature(module: str, name: str) -> str:
    """Return a call's signature without annotations, or the value of something else."""
    found: Any = importlib.import_module(module)
    if name.startswith("DistributedOptimizer.") and module == "hvdlite.torch":
        found = importlib.import_module("hvdlite.torch.scheduled").Scheduled
        name = name.partition(".")[2]
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, enum.Enum):
        return str(int(found))
    if not callable(found):
        return "attribute"
    if isinstance(found, type) and issubclass(found, BaseException):
        return "(message)"
    parameters = [
        _parameter(parameter)
        for parameter in inspect.signature(found).parameters.values()
        if parameter.name not in ("self", "_")
    ]
    return f"({', '.join(parameters)})".replace("|", "\\|")


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.default is inspect.Parameter.empty:
        return text
    default = parameter.default
    if default is global_process_set:
        return f"{text}=global_process_set"
    if isinstance(default, enum.Enum):
        return f"{text}={default.name.capitalize()}"
    if isinstance(default, Strategy):
        return f"{text}={default!r}"
    return f"{text}={re.sub(' at 0x[0-9a-f]+', '', repr(default))}"


def covering_test(module: str, name: str) -> str:
    """Return the place of a test that uses a call.

    Raises:
        LookupError: there is none.
    """
    fits = [(_fit(function, module, name), function.label) for function in _functions()]
    best, label = max(fits, key=lambda fit: (fit[0], -len(fit[1]), fit[1]))
    if not best and name.removeprefix("Compression.") in REGISTERED:
        return _LAWS
    if not best:
        raise LookupError(f"no test uses {module}.{name}")
    return label


def _fit(function: Function, module: str, name: str) -> float:
    """Return how well a function serves as the test of a call; 0: not at all."""
    owner, _, member = name.partition(".")
    wanted = _resolve(f"{module}.{owner}")
    by_owner = any(
        alias in function.words and _uses(function, alias, path, owner, wanted)
        for alias, path in function.imports
    )
    if member:
        by_owner = by_owner and re.search(rf"\.{member}\b", function.text) is not None
    if not by_owner and not (member and _uses_member(function, _resolve(f"{module}.{name}"))):
        return 0.0
    words = set((member or owner).lower().strip("_").split("_"))
    named = len(words & set(re.split(r"\W|_", function.label.lower()))) / len(words)
    others = len(set(re.findall(r"\b(?:t?hvd|hvt)\.\w+", function.text)))
    place = _PLACES.get(module, module.removeprefix("hvdlite").strip(".").replace(".", "/"))
    at_home = re.match(rf"tests/{place}" if place else r"tests/test_\w+\.py", function.label)
    return 1.0 + named + (0.5 if at_home else 0.0) + 1.0 / (2.0 + others)


def _uses(function: Function, alias: str, path: str, owner: str, wanted: Any) -> bool:
    """Return whether a function uses an object by a name that its file has imported."""
    if _resolve(path) is wanted:
        return True
    if owner not in function.words:
        return False
    ways = (f"{inner}{owner}" for inner in ("", "elastic.", "callbacks."))
    return any(
        _resolve(f"{path}.{way}") is wanted
        and re.search(rf"\b{re.escape(f'{alias}.{way}')}\b", function.text)
        for way in ways
    )


def _uses_member(function: Function, wanted: Any) -> bool:
    """Return whether a function uses a class by the name under which it was imported."""
    return isinstance(wanted, type) and any(
        alias in function.words
        and _resolve(path) is wanted
        and re.search(rf"\b{alias}\(", function.text)
        for alias, path in function.imports
    )


@cache
def _resolve(path: str) -> Any:
    """Return the module or the object of a name, or a new object."""
    parent, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        found = _resolve(parent) if parent else object()
        return getattr(found, name, object())


@cache
def _functions() -> list[Function]:
    return [
        function
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for function in _functions_of(path)
    ]


def _functions_of(path: Path) -> Iterator[Function]:
    source = path.read_text()
    imports = tuple(_imports_of(source))
    defined = {
        node.name: (node, prefix)
        for prefix, body in _scopes(ast.parse(source))
        for node in body
        if isinstance(node, ast.FunctionDef)
    }
    lines = source.splitlines()
    texts = {name: _text(lines, node) for name, (node, _) in defined.items()}
    for node in ast.parse(source).body:  # scripts, among others
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts[node.targets[0].id] = _text(lines, node)
    for name, (_, prefix) in defined.items():
        if name.startswith("test_"):
            used = _words(texts[name]) - {name}
            called = [text for other, text in texts.items() if other in used]
            label = f"{path.relative_to(ROOT)}::{prefix}{name}"
            text = "\n".join([texts[name], *called])
            yield Function(label, imports, text, _words(text))


def _imports_of(source: str) -> Iterator[tuple[str, str]]:
    """Return a file's imports, including those of scripts that it has as strings."""
    for module, alias in re.findall(r"import (hvdlite[\w.]*) as (\w+)", source):
        yield alias, module
    yield "hvdlite", "hvdlite"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OF_INTEREST):
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"


def _text(lines: list[str], node: ast.FunctionDef | ast.Assign) -> str:
    """Return the source of a node, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


def _scopes(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    yield "", tree.body
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield f"{node.name}::", node.body


def main() -> None:
    """Write the tables."""
    TABLE.write_text(table())
    STRATEGIES.write_text(about_strategies())
    ENVIRONMENT.write_text(environment())
    print(f"{TABLE.relative_to(ROOT)}: {table().count(chr(10))} lines")


if __name__ == "__main__":
    main()
