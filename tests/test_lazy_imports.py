"""Heavy libraries load where they are used, not where halp is imported."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["halp", "halp.models", "halp.data", "halp.training"])
def test_importing_loads_no_heavy_library(module, tmp_path):
    heavy = ["torchvision", "sklearn", "matplotlib", "nltk", "tqdm.auto"]
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["halp.models", "halp.data"])
def test_models_and_data_need_nothing_of_the_engine(module, tmp_path):
    # Whether "import halp" itself loads the engine is not their business: look at the sources.
    code = f"""
import ast, importlib.util, pathlib
folder = pathlib.Path(importlib.util.find_spec({module!r}).origin).parent
shared = ("halp.messages", "halp.decoding")  # words and text, which need nothing of the engine
for path in (*folder.glob("*.py"), folder.parent / "messages.py", folder.parent / "decoding.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("halp"):
            assert node.module.startswith(({module!r}, *shared)), (path, node.module)
        assert not (isinstance(node, ast.Import) and node.names[0].name.startswith("halp"))
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
