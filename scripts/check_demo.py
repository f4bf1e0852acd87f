"""Show three answers of a demo job and count the right ones: computes every sum and compares it with the job's text.

Needs every prompt answered exactly once: a missing, repeated or unknown id fails the check, whatever the share of right
answers. A row that holds an error counts as a wrong answer. Needs nothing but the standard library.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

MIN_RIGHT_SHARE = 0.98
NUM_SHOWN = 3
PROMPTS = Path(__file__).resolve().parent.parent / "examples" / "demo" / "prompts.jsonl"


def read_rows(path: Path) -> list[dict[str, object]]:
    """The rows of a JSONL file; a line that is no JSON object ends the check with its number."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            sys.exit(f"{path}, line {number}: not JSON ({error}); run the job again")
        if not isinstance(row, dict):
            sys.exit(f"{path}, line {number}: not a JSON object; run the job again")
        rows.append(row)
    return rows


def right_answer(prompt: str) -> str:
    """`"123+456="` -> `"579"`."""
    left, right = prompt.removesuffix("=").split("+")
    return str(int(left) + int(right))


def find_faults(prompt_ids: list[str], output_ids: list[str]) -> list[str]:
    """What is wrong with the set of answered ids, a sentence a kind; empty when each is there once."""
    counts = Counter(output_ids)
    kinds = {
        "missing": [row_id for row_id in prompt_ids if counts[row_id] == 0],
        "repeated": [row_id for row_id, count in counts.items() if count > 1],
        "not among the prompts": sorted(set(counts) - set(prompt_ids)),
    }
    return [f"{len(ids)} rows {kind}: {', '.join(ids[:5])}" for kind, ids in kinds.items() if ids]


def show_answers(prompts: dict[str, str], rows: list[dict[str, object]]) -> None:
    """`123+456= -> 579`, for the first few of the output."""
    for row in rows[:NUM_SHOWN]:
        print(f"{prompts.get(str(row.get('id')), '?')} -> {row.get('text', row.get('error'))}")


def main() -> int:
    """Print the score; 0 when it is high enough and no row is missing or repeated, else 1."""
    parser = argparse.ArgumentParser(description="Count the right answers of a demo job.")
    parser.add_argument("output", type=Path, help="the rows that `zinfer run` wrote")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="the prompts that it read")
    parser.add_argument("--show", action="store_true", help=f"print {NUM_SHOWN} prompts with their answers instead")
    arguments = parser.parse_args()
    prompts = {str(row["id"]): str(row["prompt"]) for row in read_rows(arguments.prompts)}
    answers = {row_id: right_answer(prompt) for row_id, prompt in prompts.items()}
    rows = read_rows(arguments.output)
    if arguments.show:
        show_answers(prompts, rows)
        return 0
    faults = find_faults(list(answers), [str(row.get("id")) for row in rows])
    for fault in faults:
        print(f"{arguments.output}: {fault}", file=sys.stderr)
    texts = {str(row.get("id")): row.get("text") for row in rows}
    num_right = sum(texts.get(row_id) == answer for row_id, answer in answers.items())
    share = num_right / len(answers)
    print(f"right answers: {num_right} of {len(answers)} ({share:.1%})")
    return 0 if share >= MIN_RIGHT_SHARE and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
