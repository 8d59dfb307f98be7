"""The documentation is compared with the code: first examples run, links and files exist.

The README's table of what is served is the registries'.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.knobs import knob_types
from headrace.models.registry import MODELS
from headrace.quantization.formats import MADE_AT_LOAD
from tests.serving import Serve
from tests.speed import PATIENCE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
NOTES = sorted(ROOT.glob("docs/notes/*.md"))
ADDRESS = "http://127.0.0.1:8000"


def fences(page: Path) -> list[tuple[str, str]]:
    """Return the fenced blocks of a page in order, each as (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def first_examples(page: Path) -> list[tuple[str, str]]:
    """Return the blocks before the page's first heading of second rank: what a reader is shown first."""
    beginning = re.split(r"^## ", page.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```(\w*)\n(.*?)^```$", beginning, re.MULTILINE | re.DOTALL)


# ---- examples


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Serve("demo") as server:
        yield server


def run_shell(text: str, server: Serve | None = None) -> str:
    """Run an example as a reader's shell would, against this test's server in place of the one on port 8000."""
    if server is not None:
        text = text.replace(ADDRESS, server.url)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-ec", text], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an example of commands in this process, which has imported already what each would import for seconds, with
    `folder` as the one that it makes; what else it does, in a shell."""
    text = text.replace("\\\n", " ").replace("folder=$(mktemp -d)\n", "").replace("rm -r $folder\n", "")
    for line in text.replace("$folder", str(folder)).splitlines():
        if line.startswith("headrace "):
            assert main(shlex.split(line)[1:]) == 0
        else:
            run_shell(line)
    return capsys.readouterr().out


def run_python(text: str, capsys: pytest.CaptureFixture[str], server: Serve | None = None) -> str:
    exec(text if server is None else text.replace(ADDRESS, server.url), {})
    return capsys.readouterr().out


def test_readme_requests_are_answered(server: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = fences(ROOT / "README.md")
    (curl,) = (text for language, text in blocks if language == "sh")
    assert '"finish_reason"' in run_shell(curl, server)
    (sdk,) = (text for language, text in blocks if language == "python" and "openai" in text)
    assert run_python(sdk, capsys, server).strip()


def test_serving_begins_with_a_server_and_a_request(server: Serve) -> None:
    (start, request) = [text for _, text in first_examples(ROOT / "docs/serving.md")]
    assert start.strip() == "headrace serve demo", "what the fixture runs"
    assert '"text":' in run_shell(request, server)


def test_tools_begins_with_a_call(server: Serve) -> None:
    ((_, text),) = first_examples(ROOT / "docs/tools_and_reasoning.md")
    assert '"calls":[{"name":"weather","parameters":"{' in run_shell(text, server)


def test_agents_begins_with_a_message(server: Serve) -> None:
    ((_, text),) = first_examples(ROOT / "docs/agents.md")
    assert '"type":"message"' in run_shell(text, server)


def test_operations_begins_with_health_and_load(server: Serve) -> None:
    ((_, text),) = first_examples(ROOT / "docs/operations.md")
    said = run_shell(text, server)
    assert "health: 200" in said
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert name in said


def test_offline_begins_with_generate(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, text),) = first_examples(ROOT / "docs/offline.md")
    assert "Once upon a time ->" in run_python(text, capsys)


def test_the_start_page_begins_with_a_story() -> None:
    """As a process, like a reader's."""
    ((_, text),) = first_examples(ROOT / "docs/README.md")
    assert run_shell(text).strip()


def test_planning_begins_with_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_, command), (_, shown) = first_examples(ROOT / "docs/planning.md")
    said = run_here(command, tmp_path, capsys)
    assert "tensor_parallel_size" in said
    for line in shown.splitlines()[:2]:
        assert line in said


def test_quantizing_begins_with_a_model_in_fewer_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, text),) = first_examples(ROOT / "docs/quantizing.md")
    assert "7.9 MB -> 4.5 MB" in run_here(text, tmp_path, capsys)


def test_evaluating_begins_with_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, text),) = first_examples(ROOT / "docs/evaluating.md")
    assert "exact_match,strict-match" in run_here(text, tmp_path, capsys)


def test_models_begins_with_what_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, text),) = first_examples(ROOT / "docs/models.md")
    served, planned = run_python(text, capsys).splitlines()
    assert "LlamaForCausalLM" in served
    assert "GptOssForCausalLM" in served
    assert "DeepseekV32ForCausalLM" in served
    assert "Llama4ForConditionalGeneration" in served
    assert planned.startswith("planned, not served yet:")


def test_architecture_begins_with_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, text),) = first_examples(ROOT / "docs/architecture.md")
    assert run_python(text, capsys).splitlines() == ["[32] [False]", "[8] [True]"]


def test_performance_begins_with_a_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, text),) = first_examples(ROOT / "docs/performance.md")
    assert "ms" in run_here(text, tmp_path, capsys)


def test_every_page_says_what_it_is_for() -> None:
    for page in PAGES[1:]:
        title, _, beginning = page.read_text().partition("\n\n")
        assert title.startswith("# "), page
        assert beginning.startswith("After reading"), page
    for page in PAGES[2:]:
        assert first_examples(page), page


# ---- what the pages name


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    names = re.findall(r"\b(?:headrace|bench|tests|docs)/[\w/-]+\.(?:py|json|md)\b", text)
    for name in [*names, *re.findall(r"`([\w/]+/\w+\.py)`", text)]:
        assert any((folder / name).is_file() for folder in (ROOT, ROOT / "headrace")), f"{name} is no file"


@pytest.fixture(scope="module")
def words() -> set[str]:
    """All words of the code."""
    files = [*ROOT.glob("headrace/**/*.py"), *ROOT.glob("bench/**/*.py")]
    return set(re.findall(r"\w+", " ".join(path.read_text() for path in files)))


@pytest.mark.parametrize("page", [ROOT / "docs/architecture.md", *NOTES], ids=lambda page: page.name)
def test_names_of_code_exist(page: Path, words: set[str]) -> None:
    for name in re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)*)(?:\([^`]*\))?`", page.read_text()):
        missing = [part for part in name.split(".") if part not in words and ("_" in part or not part.islower())]
        assert not missing, f"nothing is called {name}"


def test_results_are_kept_and_named() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    for path in ROOT.glob("bench/results/*.json"):
        assert f"bench/results/{path.name}" in text, f"{path.name} is not in docs/performance.md"


def test_pages_are_as_short_as_they_promise() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
    assert len((ROOT / "docs/architecture.md").read_text().split()) <= 1500


# ---- what is served


def test_readme_says_what_is_served() -> None:
    """Its table has each architecture of the registry in one row, behind what people call its models, and says of each
    row what holds for all of it."""
    flags = [name for name in knob_types(EngineConfig) if name.endswith("_parallel_size")]
    flags.remove("data_parallel_size")  # engines that share nothing serve whatever one does
    columns = ["models", "`architectures`", "plain weights"]
    columns += [f"`{name}`" for name in MADE_AT_LOAD]
    columns += [f"`--{name.replace('_', '-')}`" for name in flags]
    title, _, *lines = [
        line.strip("| ").split(" | ") for line in table_behind(ROOT / "README.md", "| " + " | ".join(columns) + " |")
    ]
    assert title == columns
    rows = [(set(re.findall(r"`(\w+)`", of)), verdicts) for _, of, *verdicts in lines]
    for entry in MODELS:
        verdict = ["yes" if entry.module else "plan"] * (len(columns) - 2)
        held = [verdicts for of, verdicts in rows if entry.architecture in of]
        assert held == [verdict], f"{entry.architecture} should be in one row of the README, with {verdict[0]!r}"
    assert sum(len(of) for of, _ in rows) == len(MODELS)
    assert len({name for name, *_ in lines}) == len(lines)


def table_behind(page: Path, title: str) -> list[str]:
    """Return the lines of the table that begins with `title`."""
    text = page.read_text()
    assert title in text, f"{page.name} should have a table with {title}"
    return text[text.index(title) :].partition("\n\n")[0].splitlines()
