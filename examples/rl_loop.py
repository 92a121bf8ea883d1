"""A whole GRPO loop over the public Tinker client, in one file: sample, grade, compare within the group, train.

It needs a server and the `tinker` package (`pip install tinker`), and nothing of LoCoJAX:

    locojax serve smollm2-135m                                        # in one terminal
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local \
        python examples/rl_loop.py                                    # in another

The model learns to answer sums of one-digit numbers, by reward alone: 1 for the right number and nothing else.
Half of the sums are never trained on; how many of them it gets right, greedily, is printed before and after.

One step, with what it costs in round trips:
  1. A sampler of the weights as they are now.                      one request
  2. `--groups` prompts, `--group-size` answers each, all at once.  one request a prompt
  3. Rewards; a group's mean is its baseline, its spread its scale. here
  4. Gradients, and the optimizer's step, sent without waiting.     two requests
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence

import tinker
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase

SHOTS = ((8, 5), (1, 6))  # examples in every prompt: the model reads the form of an answer off them


@dataclasses.dataclass(frozen=True)
class Problem:
    """A sum. Example: Problem(3, 4).answer == "7" """

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"What is {self.a} + {self.b}?"

    @property
    def answer(self) -> str:
        return str(self.a + self.b)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One sampled answer, with what training needs of it."""

    tokens: list[int]
    logprobs: list[float]
    reward: float


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """(to train on, held out). 3 + 4 and 4 + 3 are the same problem to a learner: they are never split."""
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10) if (a, b) not in {tuple(sorted(s)) for s in SHOTS}]
    random.Random(seed).shuffle(pairs)
    cut = 2 * len(pairs) // 3
    train, held_out = (
        [Problem(*pair) for a, b in part for pair in {(a, b), (b, a)}] for part in (pairs[:cut], pairs[cut:])
    )
    return train, held_out


def batches(items: Sequence[Problem], size: int, seed: int) -> Iterator[list[Problem]]:
    """For ever: each pass over the problems in a new order."""
    shuffler, waiting = random.Random(seed), list[Problem]()
    while True:
        while len(waiting) < size:
            waiting += shuffler.sample(items, len(items))
        yield waiting[:size]
        waiting = waiting[size:]


def prompt(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The problem after the examples, in the model's own chat format, up to where the answer begins."""
    turns = [Problem(a, b) for a, b in SHOTS]
    messages = [
        message
        for turn in turns
        for message in (
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        )
    ]
    messages.append({"role": "user", "content": problem.question})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(str(text), add_special_tokens=False))


def grade(problem: Problem, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> float:
    """1 for exactly the number, else 0."""
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    return float(text.strip() == problem.answer)


def roll_out(
    sampler: tinker.SamplingClient,
    batch: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    num_samples: int,
    params: types.SamplingParams,
) -> list[list[Answer]]:
    """A group of graded answers for each problem. All prompts are under way before the first is waited for."""
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(prompt(problem, tokenizer)),
            num_samples=num_samples,
            sampling_params=params,
        )
        for problem in batch
    ]
    groups = []
    for problem, future in zip(batch, futures, strict=True):
        sequences = future.result().sequences
        groups.append(
            [Answer(s.tokens, list(s.logprobs or ()), grade(problem, s.tokens, tokenizer)) for s in sequences]
        )
    return groups


def advantages(group: Sequence[Answer]) -> list[float]:
    """GRPO's: reward less the group's mean, over its standard deviation. All alike: nothing to learn, all 0."""
    rewards = [answer.reward for answer in group]
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / spread if spread else 0.0 for reward in rewards]


def to_datum(prompt_tokens: Sequence[int], answer: Answer, advantage: float) -> types.Datum:
    """Prompt and answer as one sequence: position i of the input predicts target i, so both are shifted by one.

    Prompt positions have advantage 0: they are read, not trained.
    """
    tokens = [*prompt_tokens, *answer.tokens]
    padding = [0.0] * (len(prompt_tokens) - 1)
    count = len(answer.tokens)
    n = len(tokens) - 1

    def floats(values: Sequence[float]) -> types.TensorData:
        return types.TensorData(data=list(values), dtype="float32", shape=[n])

    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[n]),
            "logprobs": floats([*padding, *answer.logprobs]),
            "advantages": floats([*padding, *([advantage] * count)]),
        },
    )


def to_data(
    batch: Sequence[Problem], groups: Sequence[Sequence[Answer]], tokenizer: PreTrainedTokenizerBase
) -> list[types.Datum]:
    """Every answer that has something to teach. The server's losses are sums, so the mean is taken here."""
    num_tokens = sum(len(answer.tokens) for group in groups for answer in group)
    data = []
    for problem, group in zip(batch, groups, strict=True):
        tokens = prompt(problem, tokenizer)
        for answer, advantage in zip(group, advantages(group), strict=True):
            if advantage:
                data.append(to_datum(tokens, answer, advantage / num_tokens))
    return data


def accuracy(
    sampler: tinker.SamplingClient, items: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> float:
    """The share of right greedy answers."""
    greedy = types.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    groups = roll_out(sampler, items, tokenizer, 1, greedy)
    return statistics.fmean(group[0].reward for group in groups)


def load_tokenizer(name: str | None, trainer: tinker.TrainingClient) -> PreTrainedTokenizerBase:
    """The named one, a directory or a hub id; else the one that the server names for its model."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name) if name else trainer.get_tokenizer()
    return tokenizer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--tokenizer", help="a directory or a hub id; default: what the server names")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--groups", type=int, default=16, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="answers a prompt")
    parser.add_argument("--max-tokens", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--loss", default="importance_sampling", help="or ppo, cispo, ...")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.api_key = os.environ.get("TINKER_API_KEY", "tml-local")  # no option: other users could read it off `ps`
    return args


def learn(service: tinker.ServiceClient, args: argparse.Namespace) -> None:
    rest = tinker.RestClient(base_url=args.base_url, api_key=args.api_key)
    model = args.model or rest.get_server_capabilities().result().supported_models[0].model_name
    trainer = service.create_lora_training_client(base_model=model, rank=args.rank, seed=args.seed).result()
    tokenizer = load_tokenizer(args.tokenizer, trainer)
    train, held_out = problems(args.seed)
    params = types.SamplingParams(max_tokens=args.max_tokens, temperature=1.0)

    sampler = trainer.save_weights_and_get_sampling_client().result()
    before = accuracy(sampler, held_out, tokenizer, args.max_tokens)
    print(f"{model}: {before:.0%} of {len(held_out)} held-out sums right before training", flush=True)
    for step, batch in zip(range(args.steps), batches(train, args.groups, args.seed), strict=False):
        started = time.perf_counter()
        groups = roll_out(sampler, batch, tokenizer, args.group_size, params)
        data = to_data(batch, groups, tokenizer)
        reward = statistics.fmean(answer.reward for group in groups for answer in group)
        if data:
            rate = args.learning_rate * (1 - step / args.steps)
            gradients = trainer.forward_backward(data, args.loss)
            update = trainer.optim_step(types.AdamParams(learning_rate=rate, eps=1e-8))
            gradients.result()
            update.result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        seconds = time.perf_counter() - started
        print(f"step {step:3d}  reward {reward:.3f}  trained on {len(data):3d}  {seconds:.1f} s", flush=True)

    after = accuracy(sampler, held_out, tokenizer, args.max_tokens)
    print(f"{model}: {after:.0%} of the held-out sums right after training", flush=True)
    print(f"saved as {trainer.save_weights_for_sampler('addition').result().path}")


def main() -> None:
    args = arguments()
    # Leaving the block ends the session: the server frees its adapter at once, instead of when heartbeats stay away.
    with tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key) as service:
        learn(service, args)


if __name__ == "__main__":
    main()
