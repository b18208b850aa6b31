"""A Paddle inference model, as `paddle.jit.save` and `paddle.static.save_inference_model` write it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.oip import Datatype, ModelSignature, TensorSpec, digest_of
from edl_runtime.protocol.tensors import Array
from edl_runtime.teacher.errors import ModelError
from edl_runtime.teacher.models.model import DATATYPES, ModelOptions, check_protobuf, tokenizer_in

_FIRST_GPU_MEMORY_MB = 100  # grows as needed

log = get_logger(__name__)


class PaddleModel:
    """A predictor on one CPU thread, or on a GPU. Its `run` holds the GIL throughout."""

    def __init__(self, folder: Path, options: ModelOptions) -> None:
        """Load the one model in `folder`. Raises ModelError."""
        program, parameters = _find(folder, options)
        paddle = _import_paddle(options)
        try:
            inputs, outputs = _read_specs(paddle, program, options)
            self._predictor = _create_predictor(paddle, program, parameters, options)
        except ModelError:
            raise
        except Exception as error:  # Paddle raises many types for a file that is no model
            raise ModelError(options.model, f"Paddle can't load {program.name}: {_reason(error)}") from error
        names = self._predictor.get_output_names()
        self.signature = ModelSignature(
            name=options.name,
            versions=(digest_of([program, parameters]),),
            platform="paddle",
            inputs=inputs,
            outputs=tuple(TensorSpec(name, *output) for name, output in zip(names, outputs, strict=True)),
            extensions=tokenizer_in(folder),
        )
        self._inputs = {spec.name: self._predictor.get_input_handle(spec.name) for spec in inputs}

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        for name, array in inputs.items():
            self._inputs[name].copy_from_cpu(array)
        self._predictor.run()
        return {name: self._predictor.get_output_handle(name).copy_to_cpu() for name in outputs}


def output_names(folder: Path, options: ModelOptions) -> list[str]:
    """Return the outputs of the one model in `folder` without loading it; none if its format is not JSON.

    Raises ModelError unless there is one model, and if its program is damaged.
    """
    program, _ = _find(folder, options)
    if program.suffix == ".pdmodel":
        check_protobuf(program, options)
        return []
    try:
        content: Any = JsonDecoder(Any).decode(program.read_bytes())
        operations = content["program"]["regions"][0]["blocks"][0]["ops"]
        attributes = [each for one in operations if one["#"] == "1.fetch" for each in one["A"]]
        return [each["AT"]["D"] for each in attributes if each["N"] == "name"]
    except msgspec.DecodeError as error:
        raise ModelError(options.model, f"{program.name} is damaged: {error}") from None
    except (OSError, LookupError, TypeError):  # a future format
        return []


def _find(folder: Path, options: ModelOptions) -> tuple[Path, Path]:
    """Return the program and the parameters of the one model in `folder`."""
    if not folder.is_dir():
        raise ModelError(options.model, "there is no such folder")
    entries = sorted(folder.iterdir())
    if not entries:
        raise ModelError(options.model, "the folder is empty")
    expected = "a Paddle inference model is one .json or .pdmodel file and its .pdiparams"
    parameters = [path for path in entries if path.suffix == ".pdiparams"]
    programs = [
        program
        for path in parameters
        for program in (path.with_suffix(".json"), path.with_suffix(".pdmodel"))
        if program.is_file()
    ]
    if not programs:
        raise ModelError(
            options.model, f"no model in it: {expected}; there are {', '.join(p.name for p in entries[:9])}"
        )
    if len(programs) > 1:
        raise ModelError(options.model, f"several models in it ({', '.join(p.name for p in programs)}): {expected}")
    return programs[0], programs[0].with_suffix(".pdiparams")


def _import_paddle(options: ModelOptions) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No ccache found")
            import paddle
            import paddle.inference
    except ImportError as error:
        raise ModelError(options.model, "Paddle is missing; pip install 'edl-airflow[paddle]'") from error
    return paddle


def _read_specs(
    paddle: Any, program: Path, options: ModelOptions
) -> tuple[tuple[TensorSpec, ...], list[tuple[Datatype, tuple[int, ...]]]]:
    """Return the inputs, and the datatypes and shapes of the outputs, which the predictor itself does not expose."""
    with _static_mode(paddle, old=program.suffix == ".pdmodel"):
        executor = paddle.static.Executor(paddle.CPUPlace())
        loaded, names, fetched = paddle.static.load_inference_model(str(program.with_suffix("")), executor)
        block = loaded.global_block()
        if program.suffix == ".pdmodel":
            fed = {name: block.var(name) for name in names}
        else:
            feeds = [operation for operation in block.ops if operation.name() == "pd_op.data"]
            fed = {feed.attrs()["name"]: feed.results()[0] for feed in feeds}
        inputs = tuple(TensorSpec(name, *_kind_of(name, fed[name], options)) for name in names)
        outputs = [_kind_of(f"output {number}", value, options) for number, value in enumerate(fetched)]
    return inputs, outputs


@contextlib.contextmanager
def _static_mode(paddle: Any, *, old: bool) -> Iterator[None]:
    """Switch to static mode; `paddle.enable_static` works in the main thread only."""
    guard = paddle.pir_utils.OldIrGuard() if old else contextlib.nullcontext()
    static = paddle.base.framework._dygraph_guard(None)  # noqa: SLF001 - there is no public one
    with static, guard, paddle.static.scope_guard(paddle.static.Scope()):
        yield


def _kind_of(name: str, value: Any, options: ModelOptions) -> tuple[Datatype, tuple[int, ...]]:
    datatype = DATATYPES.get(value.dtype.name.lower().replace("fp", "float"))  # Paddle 3 has FLOAT32, Paddle 2 FP32
    if datatype is None:
        supported = ", ".join(DATATYPES)
        raise ModelError(options.model, f"{name!r} has the datatype {value.dtype.name}; supported are {supported}")
    return datatype, tuple(int(size) for size in value.shape)


def _create_predictor(paddle: Any, program: Path, parameters: Path, options: ModelOptions) -> Any:
    config = paddle.inference.Config(str(program), str(parameters))
    config.disable_glog_info()
    config.enable_memory_optim(_can_optimise_memory(program, options))
    if options.gpu_id is None:
        config.disable_gpu()
        config.set_cpu_math_library_num_threads(1)
    elif not paddle.device.is_compiled_with_cuda():
        raise ModelError(options.model, "this Paddle is built for CPUs only; install Paddle for GPUs")
    else:
        config.enable_use_gpu(_FIRST_GPU_MEMORY_MB, options.gpu_id)
    return paddle.inference.create_predictor(config)


def _can_optimise_memory(program: Path, options: ModelOptions) -> bool:
    """Whether Paddle may reuse memory. With it, Paddle 3.3 fails to load a .json model on CPUs."""
    if options.mem_optim and options.gpu_id is None and program.suffix == ".json":
        log.warning(
            "model.mem_optim_ignored", model=options.model, cause="Paddle supports it for .json models on GPUs only"
        )
        return False
    return options.mem_optim


def _reason(error: Exception) -> str:
    """Return the line of Paddle's message with the cause: "(NotFound) …", or the last line."""
    lines = str(error).split("\n") if str(error).strip() else [type(error).__name__]
    return next((line for line in lines if line.startswith("(")), lines[-1])
