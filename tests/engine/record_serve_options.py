"""Record what the engine's parser makes of each option of `vllm serve`, for machines without it.

In the environment of README.md beside this file:

    PYTHONPATH=engine-src engine-env/bin/python tests/engine/record_serve_options.py

writes `workbench/serving/launch/engine_options.json`: each option with the keyword that it sets
and, where it takes no value, what it sets it to; and the keywords that `vllm.LLM` takes as well.
Nothing is loaded.
"""

import dataclasses
import json
from pathlib import Path

import check_serve_command

FILE = Path(__file__).parents[2] / "workbench" / "serving" / "launch" / "engine_options.json"


def main() -> None:
    """Ask the parser about one option after another."""
    parser = check_serve_command.serve_parser()
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    rows = []
    for option, action in sorted(parser._option_string_actions.items()):
        sets = None
        if action.nargs == 0 and action.dest != "help":
            sets = getattr(parser.parse_args(["model", option]), action.dest)
        rows.append(f"{json.dumps(option)}: {json.dumps([action.dest, sets])}")
    engine = sorted(json.dumps(field.name) for field in dataclasses.fields(EngineArgs))
    FILE.write_text(
        f'{{\n"vllm": {json.dumps(vllm.__version__)},\n"options": {{\n'
        + ",\n".join(rows)
        + '\n},\n"engine": [\n'
        + ",\n".join(engine)
        + "\n]\n}\n"
    )


if __name__ == "__main__":
    main()
