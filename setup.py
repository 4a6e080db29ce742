"""The one build rule that pyproject.toml cannot express: the notebooks travel inside the wheel.

In the repository the notebooks live in `notebooks/`, beside the package. A wheel carries them as
`workbench/_notebooks/`, so that `workbench lab` finds them after `pip install beam-workbench` too.
Look for them in that order: `notebooks/` beside the package (source tree, editable installation),
then `workbench/_notebooks/` (installed package). An editable installation copies nothing.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildPyWithNotebooks(build_py):
    """`build_py` that also copies `notebooks/*.ipynb` to `workbench/_notebooks/`."""

    def _notebook_pairs(self) -> list[tuple[Path, Path]]:
        target = Path(self.build_lib) / "workbench" / "_notebooks"
        return [(path, target / path.name) for path in sorted(HERE.glob("notebooks/*.ipynb"))]

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source, target in self._notebook_pairs():
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        if not self.editable_mode:
            outputs += [str(target) for _, target in self._notebook_pairs()]
        return outputs


setup(cmdclass={"build_py": BuildPyWithNotebooks})
