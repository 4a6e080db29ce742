"""Run by a Python that has vLLM: does its parser take this ``vllm serve`` command?

Its text is handed to that Python (``python -c``), which need not have the workbench: nothing of it
is imported here. Standard input is a JSON list of the words after ``vllm serve``; standard output
ends with one JSON object, ``{"vllm": version, "refusal": sentence or null}``. Nothing is loaded:
the checkpoint need not exist, and whether the model can run so is not asked.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, get_args

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "0"  # 1 would look the checkpoint up on disk
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

_HOMES = ("common", "launchers", "openai")  # newest first


class RefusedError(ValueError):
    """The engine would not take this command."""


def refusal(words: list[str]) -> str | None:
    """Why the engine refuses the words; None where it takes them."""
    try:
        namespace = parsed(words)
        names_known(namespace)
        from vllm.engine.arg_utils import AsyncEngineArgs

        AsyncEngineArgs.from_cli_args(namespace)
        speculation_known(namespace.speculative_config or {})
    except (ValueError, TypeError, KeyError) as error:
        return str(error.args[0] if error.args else error)  # str(KeyError) adds quotes
    return None


def parsed(words: list[str]) -> Any:
    """The engine's namespace; a refusal carries the last line that its parser printed."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    home = parser_module()
    parser = home.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            namespace = parser.parse_args(words)
    except SystemExit as end:
        lines = said.getvalue().strip().splitlines() or [f"exit status {end.code}"]
        raise RefusedError(lines[-1]) from None
    home.validate_parsed_serve_args(namespace)
    return namespace


def parser_module() -> Any:
    """The module with the parser: of 0.33, of 0.32, of releases before."""
    *homes, last = (f"vllm.entrypoints.{name}.cli_args" for name in _HOMES)
    for home in homes:
        try:
            return importlib.import_module(home)
        except ModuleNotFoundError as error:
            if not home.startswith(str(error.name)):  # what it needs is missing: a broken engine
                raise
    return importlib.import_module(last)


def names_known(namespace: Any) -> None:
    """Names that the parser takes as text and the engine looks up later."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    with contextlib.suppress(ImportError):
        from vllm.plugins import load_general_plugins

        load_general_plugins()  # they may bring parsers
    if namespace.reasoning_parser:
        ReasoningParserManager.get_reasoning_parser(namespace.reasoning_parser)
    if namespace.tool_call_parser:
        ToolParserManager.get_tool_parser(namespace.tool_call_parser)


def speculation_known(given: dict[str, Any]) -> None:
    """The JSON of --speculative-config: keys and a method that the engine knows."""
    from vllm.config import speculative

    fields = {f.name for f in dataclasses.fields(speculative.SpeculativeConfig) if f.init}
    unknown = sorted(set(given) - fields)
    if unknown:
        raise RefusedError(f"SpeculativeConfig has no {', '.join(unknown)}.")
    methods = set(literals(speculative.SpeculativeMethod))
    if given.get("method") not in {None, *methods}:
        raise RefusedError(f"SpeculativeConfig has no method {given['method']}.")


def literals(annotation: Any) -> Iterator[str]:
    """The strings of nested Literal types."""
    for part in get_args(annotation):
        if isinstance(part, str):
            yield part
        else:
            yield from literals(part)


if __name__ == "__main__":
    if hasattr(signal, "alarm"):
        signal.alarm(600)  # whoever asked may have been killed: a parser that hangs ends by itself
    asked = json.load(sys.stdin)
    import vllm

    answer = {"vllm": str(vllm.__version__), "refusal": refusal(asked)}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)  # what the engine's libraries do at their end is not asked
