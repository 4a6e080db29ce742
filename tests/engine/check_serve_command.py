"""Ask vLLM's own command-line parser whether it accepts `vllm serve` commands.

Run with a Python environment with vllm 0.33.0 (README.md beside this file):

    workbench plan ... --json | jq -c .arguments | python tests/engine/check_serve_command.py

Standard input has one command on each line: a shell command ("vllm serve MODEL --flag ...") or a
JSON list of its words. One JSON object for each goes to standard output:

    {"accepted": true, "error": null, "parsed": {...}, "speculative": {...}}

`parsed` holds the values that differ from the parser's defaults. Accepted means: the engine's
parser takes every word, it knows the names given for the reasoning and tool parsers, the KV cache
dtype and the quantization, `EngineArgs` can be made from the result, and the JSON of
--speculative-config has only keys and a method that `SpeculativeConfig` knows. Nothing is loaded:
MODEL need not exist, and whether the model can run so is not asked. The exit status is 0 if every
command was accepted.

With --options it prints every option of `vllm serve` instead, which is what
`tests/data/engine_serve_options.json` holds for machines without the engine.
"""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any, get_args

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "0"  # 1 would look MODEL up on disk; nothing is looked up now
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class RefusedError(ValueError):
    """The engine would not take this command."""


def words_of(line: str) -> list[str]:
    """The words after "vllm serve"."""
    words = json.loads(line) if line.lstrip().startswith("[") else shlex.split(line)
    if words[:2] != ["vllm", "serve"]:
        raise RefusedError('The command does not begin with "vllm serve".')
    return words[2:]


def serve_parser() -> Any:
    """The engine's own parser of `vllm serve`."""
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def parse(parser: Any, words: list[str]) -> Any:
    """The engine's namespace; a refusal carries the last line that the parser printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return parser.parse_args(words)
    except SystemExit as error:
        lines = printed.getvalue().strip().splitlines() or [f"exit status {error.code}"]
        raise RefusedError(lines[-1]) from None


def check_speculative(given: dict[str, Any]) -> dict[str, Any]:
    """The JSON of --speculative-config, if the engine's configuration knows its keys."""
    from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod

    fields = {field.name for field in dataclasses.fields(SpeculativeConfig) if field.init}
    unknown = sorted(set(given) - fields)
    if unknown:
        raise RefusedError(f"SpeculativeConfig has no {', '.join(unknown)}.")
    method = given.get("method")
    if method is not None and method not in method_names(SpeculativeMethod):
        raise RefusedError(f"SpeculativeConfig has no method {method}.")
    return given


def method_names(annotation: Any) -> Iterator[str]:
    """The strings of nested Literal types."""
    for part in get_args(annotation):
        if isinstance(part, str):
            yield part
        else:
            yield from method_names(part)


def check_names(namespace: Any) -> None:
    """Names that the parser takes as text and the engine looks up later."""
    from vllm.config.cache import CacheDType
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if namespace.reasoning_parser:
        ReasoningParserManager.get_reasoning_parser(namespace.reasoning_parser)
    if namespace.tool_call_parser:
        ToolParserManager.get_tool_parser(namespace.tool_call_parser)
    if namespace.kv_cache_dtype not in set(method_names(CacheDType)):
        raise RefusedError(f"There is no KV cache dtype {namespace.kv_cache_dtype}.")
    if namespace.quantization is not None:
        get_quantization_config(namespace.quantization)


def check(parser: Any, line: str) -> dict[str, Any]:
    """The report on one command."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import validate_parsed_serve_args

    try:
        namespace = parse(parser, words_of(line))
        validate_parsed_serve_args(namespace)
        check_names(namespace)
        AsyncEngineArgs.from_cli_args(namespace)
        speculative = check_speculative(namespace.speculative_config or {})
    except (ValueError, TypeError, KeyError) as error:
        message = str(error.args[0] if error.args else error)  # str(KeyError) adds quotes
        return {"accepted": False, "error": message, "parsed": {}, "speculative": {}}
    defaults = vars(parser.parse_args([]))
    return {
        "accepted": True,
        "error": None,
        "parsed": {
            key: value
            for key, value in sorted(vars(namespace).items())
            if value != defaults.get(key) and key != "speculative_config"
        },
        "speculative": speculative,
    }


def main() -> int:
    """Report on every command of standard input (or list the options); 0 if all were accepted."""
    parser = serve_parser()
    if sys.argv[1:] == ["--options"]:
        print(json.dumps(sorted(parser._option_string_actions), indent=0))
        return 0
    reports = [check(parser, line) for line in sys.stdin if line.strip()]
    for report in reports:
        print(json.dumps(report, default=str))
    return 0 if all(report["accepted"] for report in reports) else 1


if __name__ == "__main__":
    raise SystemExit(main())
