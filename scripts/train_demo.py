"""Train the demo checkpoint: a narrow Llama that adds two numbers of at most three digits, on the CPU, from one seed.

Writes `model/` (two or more safetensors shards, index, configuration, tokenizer) and `prompts.jsonl` (200 sums that are
kept out of training) under the output folder. One example is `<bos>123+456=579<eos>`, a token a character; the loss
looks at the answer and its end only. A demo already in the output folder is replaced.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *"0123456789+="])}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages if message['role'] == 'user' %}"
    "{% if loop.last %}{{ message['content'] }}{% endif %}{% endfor %}"
)
MAX_DIGITS = 3
NUM_NUMBERS = 10**MAX_DIGITS
NUM_EXAMPLE_TOKENS = 1 + MAX_DIGITS + 1 + MAX_DIGITS + 1 + (MAX_DIGITS + 1) + 1
IGNORED = -100  # the label that transformers' loss leaves out
# Drawn evenly, nine numbers of ten would have three digits; short ones are drawn more often, so that lengths differ.
DIGIT_WEIGHTS = (0.1, 0.25, 0.65)
NUM_PROMPTS = 200
NUM_VALIDATION = 500


@dataclass(frozen=True)
class Recipe:
    """How to train. Learning rate: linear warm-up over `num_warmup_steps`, then a cosine down to zero."""

    num_steps: int
    batch_size: int
    learning_rate: float
    seed: int
    num_warmup_steps: int = 100
    weight_decay: float = 0.01
    report_every: int = 100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, spaces dropped, `<bos>` put in front, padding on the left as generation wants it."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    tokenizer.normalizer = normalizers.Replace(" ", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, VOCABULARY[BOS])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model() -> LlamaForCausalLM:
    """Eight layers of 164 thousand weights each, embeddings tied to the head; about 1.3 million weights in all."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY[PAD],
        bos_token_id=VOCABULARY[BOS],
        eos_token_id=VOCABULARY[EOS],
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=VOCABULARY[PAD],
        bos_token_id=VOCABULARY[BOS],
        eos_token_id=VOCABULARY[EOS],
    )
    return model


def draw_numbers(count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` numbers, the number of digits drawn by DIGIT_WEIGHTS and the number evenly among those of that length."""
    num_digits = torch.multinomial(torch.tensor(DIGIT_WEIGHTS), count, replacement=True, generator=generator) + 1
    high = 10**num_digits
    low = torch.where(num_digits == 1, 0, high // 10)
    return low + (torch.rand(count, generator=generator, dtype=torch.float64) * (high - low)).long()


def draw_held_out(count: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """`count` distinct pairs of numbers."""
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < count:
        left, right = draw_numbers(2, generator).tolist()
        pairs[left, right] = None
    return list(pairs)


class Examples:
    """Batches of training examples; pairs in `held_out` never occur in them."""

    def __init__(self, held_out: list[tuple[int, int]], generator: torch.Generator) -> None:
        self._generator = generator
        self._is_held_out = torch.zeros(NUM_NUMBERS, NUM_NUMBERS, dtype=torch.bool)
        self._is_held_out[tuple(torch.tensor(held_out).T)] = True

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels, each [at most count, NUM_EXAMPLE_TOKENS]; the held-out pairs drawn are left out."""
        left, right = draw_numbers(count, self._generator), draw_numbers(count, self._generator)
        keep = ~self._is_held_out[left, right]
        rows = [self.encode(a, b) for a, b in zip(left[keep].tolist(), right[keep].tolist(), strict=True)]
        ids = torch.tensor([row[0] for row in rows])
        labels = torch.tensor([row[1] for row in rows])
        return ids, labels

    @staticmethod
    def encode(left: int, right: int) -> tuple[list[int], list[int]]:
        """Token ids and labels of one example, padded on the right to NUM_EXAMPLE_TOKENS."""
        prompt = [VOCABULARY[BOS], *(VOCABULARY[c] for c in f"{left}+{right}=")]
        answer = [*(VOCABULARY[c] for c in str(left + right)), VOCABULARY[EOS]]
        num_pads = NUM_EXAMPLE_TOKENS - len(prompt) - len(answer)
        ids = [*prompt, *answer, *[VOCABULARY[PAD]] * num_pads]
        return ids, [*[IGNORED] * len(prompt), *answer, *[IGNORED] * num_pads]


def learning_rate_share(step: int, recipe: Recipe) -> float:
    """The share of the full learning rate at `step`, 0 to 1."""
    if step < recipe.num_warmup_steps:
        return (step + 1) / recipe.num_warmup_steps
    progress = (step - recipe.num_warmup_steps) / max(1, recipe.num_steps - recipe.num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def right_share(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]) -> float:
    """The share of `pairs` whose sum the model writes exactly, greedily, in one left-padded batch."""
    batch = tokenizer([f"{left}+{right}=" for left, right in pairs], return_tensors="pt", padding=True)
    tokens = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=MAX_DIGITS + 2
    )
    texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    num_right: int = sum(text == str(left + right) for text, (left, right) in zip(texts, pairs, strict=True))
    return num_right / len(pairs)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, held_out: list[tuple[int, int]]
) -> None:
    """Train in place; prints loss and accuracy on the held-out pairs past the first NUM_PROMPTS as it goes."""
    examples = Examples(held_out, torch.Generator().manual_seed(recipe.seed + 1))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, recipe))
    started_s = time.perf_counter()
    for step in range(1, recipe.num_steps + 1):
        ids, labels = examples.draw(recipe.batch_size)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % recipe.report_every == 0 or step == recipe.num_steps:
            share = right_share(model, tokenizer, held_out[NUM_PROMPTS:])
            elapsed_s = time.perf_counter() - started_s
            print(f"step {step:5d}  loss {loss.item():.4f}  right {share:.1%}  {elapsed_s:.0f} s", flush=True)


def main(
    out: Annotated[Path, typer.Option(help="Folder that gets model/ and prompts.jsonl.")] = Path("examples/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2500,
    batch_size: Annotated[int, typer.Option(min=8, help="Examples a step.")] = 96,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Seeds the weights, the examples and the prompts.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; the weights' last bits depend on it.")] = 1,
) -> None:
    """Train the demo checkpoint and write it with its 200 prompts."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    held_out = draw_held_out(NUM_PROMPTS + NUM_VALIDATION, torch.Generator().manual_seed(seed))
    tokenizer, model = make_tokenizer(), make_model()
    train(model, tokenizer, Recipe(steps, batch_size, learning_rate, seed), held_out)
    prompts = held_out[:NUM_PROMPTS]
    print(f"right on the {NUM_PROMPTS} prompts: {right_share(model, tokenizer, prompts):.1%}")
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out / "model", max_shard_size="3MB")
    tokenizer.save_pretrained(out / "model")
    rows = [{"id": f"sum-{i:03d}", "prompt": f"{left}+{right}="} for i, (left, right) in enumerate(prompts)]
    (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
