"""Equal work or no comparison; then the figures, the table, the JSON and the picture."""

from __future__ import annotations

import json

import pytest
from make_runs import write_run

from locojax import cli
from locojax.errors import ComparisonError
from locojax.measure.compare import compare
from locojax.measure.launches import find_launches, read_launch

COLD = [9.0, 9.0]  # the first pass; its seconds must not matter


def fails(a, b, **options) -> str:
    with pytest.raises(ComparisonError) as caught:
        compare(a, b, **options)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_second_pass_is_scored_without_evaluation(tmp_path):
    a = write_run(tmp_path / "a", [*COLD, 1.0, 2.0])
    b = write_run(tmp_path / "b", [*COLD, 3.0, 6.0], output_tokens=[[10] * 4, [10] * 4, [9] * 4, [11] * 4])
    found = compare([a], [b], num_resamples=200)
    assert found.first_scored == 2 and found.verdict == "faster"
    assert found.speedup.per_step.estimate == pytest.approx(3.0)
    assert found.speedup.per_token.estimate == pytest.approx(3.0)
    assert found.a.times.seconds.tolist() == [[1.0, 2.0]] and found.a.times.tokens.tolist() == [[40.0, 40.0]]
    assert compare([b], [a], num_resamples=200).verdict == "slower"
    assert found.a.work() == {"prompt": 5.5, "output": 10.0, "longest_output": 10.0, "truncated_share": 0.0}


def test_of_a_single_pass_all_but_the_first_step_is_scored(tmp_path):
    batches = [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
    a, b = (write_run(tmp_path / name, [9.0, 1.0, 2.0], batches=batches) for name in "ab")
    assert compare([a], [b], passes=1, num_resamples=50).a.times.seconds.tolist() == [[1.0, 2.0]]
    short = write_run(tmp_path / "short", [1.0])
    assert fails([short], [b], passes=1) == (
        f"The run {short} has nothing to score: its first step only warms up. Got: 1 step. Expected: at least 2."
    )


def test_a_run_that_is_not_two_passes_is_refused(tmp_path):
    good = write_run(tmp_path / "good", [*COLD, 1.0, 2.0])
    once = write_run(tmp_path / "once", [1.0] * 4, batches=[["p0", "p1"], ["p2", "p3"], ["p0", "p1"], ["p2", "p9"]])
    assert fails([good], [once]) == (
        f"The run {once} is not 2 passes over the same batches. Got: steps 1 and 3: prompt 2 is p3 and p9. Expected: "
        "the same prompts in the same order. Train with run.passes=2, or compare with --passes 1, which scores every "
        "step after the first."
    )
    odd = write_run(tmp_path / "odd", [1.0] * 3)
    assert f"The run {odd} is not 2 passes over the same batches. Got: 3 steps." in fails([odd], [good])


def test_launches_on_several_hosts_are_put_together_in_the_batch_s_order(tmp_path):
    batches = [["p3", "p0", "p2"], ["p1", "p4", "p5"]]
    one = write_run(tmp_path / "one", [*COLD, 1.0, 2.0], batches=batches)
    many = write_run(tmp_path / "many", [*COLD, 1.0, 2.0], batches=batches, num_hosts=2)
    assert read_launch(many).steps[2].prompt_ids == ("p3", "p0", "p2")
    assert compare([one], [many], num_resamples=50).verdict == "no verdict"


def test_other_prompts_or_another_order_are_refused(tmp_path):
    a = write_run(tmp_path / "a", [*COLD, 1.0, 2.0])
    turned = write_run(tmp_path / "b", [*COLD, 1.0, 2.0], batches=[["p0", "p1"], ["p3", "p2"]])
    assert fails([a], [turned]) == (
        f"The launches did not do equal work. Got: step 3: prompt 1 is p2 and p3 (A ({a}) and B ({turned})). "
        "Expected: the same prompts in the same order on every step."
    )
    fewer = write_run(tmp_path / "c", [*COLD, 1.0, 2.0], batches=[["p0", "p1"], ["p2"]])
    assert "Got: step 3: 2 and 1 prompts (A" in fails([a], [fewer])
    longer = write_run(tmp_path / "d", [*COLD * 2, 1.0, 2.0, 1.0, 2.0])
    assert "Got: 2 and 4 scored steps (A" in fails([a], [longer])


def test_a_launch_that_strays_from_its_own_side_is_refused(tmp_path):
    a = [write_run(tmp_path / f"a{index}", [*COLD, 1.0, 2.0]) for index in range(2)]
    b = write_run(tmp_path / "b", [*COLD, 1.0, 2.0])
    stray = write_run(tmp_path / "a2", [*COLD, 1.0, 2.0], output_tokens=[[10] * 4] * 3 + [[10, 10, 10, 19]])
    assert f"(A ({a[0]}) and A ({stray}))" in fails([*a, stray], [b])


def edit_samples(folder, step, change):
    path = folder / "samples" / f"step_{step:05d}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))


def test_longer_prompts_are_refused_on_any_step(tmp_path):
    a, b = (write_run(tmp_path / name, [*COLD, 1.0, 2.0]) for name in "ab")
    edit_samples(b, 2, lambda row: {**row, "num_prompt_tokens": row["num_prompt_tokens"] + (row["position"] == 0)})
    compare([a], [b], num_resamples=50)  # half a token in the mean
    edit_samples(b, 2, lambda row: {**row, "num_prompt_tokens": row["num_prompt_tokens"] + 1})
    text = fails([a], [b])
    assert "Got: step 2: mean prompt length 5.50 and 7.00 tokens (A" in text
    assert text.endswith("Expected: at most 0.5 token apart on every step.")


@pytest.mark.parametrize(
    ("lengths", "got", "expected"),
    [
        ([14, 12, 12, 13], "mean output length 10.0 and 12.6 tokens, most apart at step 2: 10.0 and 12.8",
         "a ratio within 0.8 to 1.25"),
        ([10, 10, 10, 13], "longest output 10.0 and 13.0 tokens, most apart at step 2: 10.0 and 13.0",
         "a ratio within 0.8 to 1.25"),
    ],
)  # fmt: skip
def test_other_outputs_are_refused(tmp_path, lengths, got, expected):
    second = lengths if lengths[0] == 10 else [12, 12, 13, 13]
    a = write_run(tmp_path / "a", [*COLD, 1.0, 2.0])
    b = write_run(tmp_path / "b", [*COLD, 1.0, 2.0], output_tokens=[[10] * 4, [10] * 4, lengths, second])
    text = fails([a], [b])
    assert f"Got: {got} (A" in text and text.endswith(f"Expected: {expected}.")


def test_other_shares_of_completions_cut_off_are_refused(tmp_path):
    a = write_run(tmp_path / "a", [*COLD, 1.0, 2.0], output_tokens=[[19] * 4] * 4)
    b = write_run(tmp_path / "b", [*COLD, 1.0, 2.0], output_tokens=[[19] * 4] * 3 + [[19, 19, 19, 20]])
    text = fails([a], [b])
    assert "Got: 0.0 % and 12.5 % of completions cut off, most apart at step 3: 0.0 and 25.0 (A" in text
    assert text.endswith("Expected: at most 10 points apart.")


def test_fewer_completions_are_refused(tmp_path):
    a, b = (write_run(tmp_path / name, [*COLD, 1.0, 2.0]) for name in "ab")
    path = b / "samples" / "step_00002.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert fails([a], [b]) == (
        f"The run {b} has not all samples of step 2. Got: 3 completions. Expected: 4, as its metrics say. Copy the "
        "samples of its other hosts beside those of the first."
    )
    larger = write_run(tmp_path / "c", [*COLD, 1.0, 2.0], group_size=3)
    assert "Got: step 2: 4 and 6 completions (A" in fails([a], [larger])


def test_completions_may_hold_any_character(tmp_path):
    """JSON leaves some ends of lines, as Unicode knows them, as they are."""
    a = write_run(tmp_path / "a", [*COLD, 1.0, 2.0])
    path = a / "samples" / "step_00003.jsonl"
    rows = [json.loads(line) | {"completion": "a\u2028b\x85c\x1cd"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert len(read_launch(a).steps[3].output_tokens) == len(rows)


def test_what_is_not_a_whole_run_is_refused(tmp_path):
    a = write_run(tmp_path / "a", [*COLD, 1.0, 2.0])
    b = write_run(tmp_path / "b", [*COLD, 1.0, 2.0])
    lines = (b / "metrics.jsonl").read_text().splitlines(keepends=True)
    (b / "metrics.jsonl").write_text("".join([lines[0], lines[1], lines[3]]))
    expected = f"The run {b} can't be compared. Got: steps 0-1, 3. Expected: every step from 0 on, once."
    assert fails([a], [b]) == expected
    (b / "metrics.jsonl").write_text("")
    assert "Got: no finished step." in fails([a], [b])
    (b / "metrics.jsonl").write_text("".join(lines))
    (b / "samples" / "step_00003.jsonl").write_text('{"prompt_id": "p"}\n')
    assert "step_00003.jsonl, line 1 is not a completion that can be compared. Expected: JSON with" in fails([a], [b])
    (b / "samples" / "step_00003.jsonl").unlink()
    assert fails([a], [b]) == f"The run {b} has no samples of step 3. Copy its folder whole."
    assert "The margin is a speed-up to be exceeded. Got: 0.9." in fails([a], [b], margin=0.9)


def test_launches_are_found_by_folder_by_folder_of_folders_and_by_pattern(tmp_path):
    runs = [write_run(tmp_path / "co" / name, [1.0, 2.0]) for name in ("run-1", "run-2", "other")]
    assert find_launches([str(runs[1])]) == [runs[1]]
    assert find_launches([str(tmp_path / "co")]) == sorted(runs)
    assert find_launches([str(tmp_path / "co" / "run-*")]) == runs[:2]
    with pytest.raises(ComparisonError, match="There is no run at .*absent"):
        find_launches([str(tmp_path / "absent")])


def test_the_command_shows_a_table_and_writes_json_and_a_picture(tmp_path, capsys):
    for index, seconds in enumerate([(1.0, 2.0), (1.1, 2.1), (1.05, 1.95)]):
        write_run(tmp_path / "a" / f"a{index}", [*COLD, *seconds], changes={"run.name": f"a{index}"})
        twice = [2 * value for value in seconds]
        write_run(tmp_path / "b" / f"b{index}", [*COLD, *twice], changes={"rollout.top_k": 5})
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(out), "--plot", str(picture)]
    assert cli.main([*arguments, "--margin", "1.01"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "A: a0, a1, a2 B: b0, b1, b2 A B A's speed-up, 95 % seconds a step 1.533 3.067 2.00x [" in shown
    assert "A is faster than B: both intervals lie above 1.01" in shown
    assert "scored: steps 2 to 3, the last pass over the batches" in shown
    assert "settings of A | B that differ: rollout.top_k = -1 | 5" in shown
    found = json.loads(out.read_text())
    assert found["speedup_per_step"]["estimate"] == pytest.approx(2.0)
    assert found["scored_steps"] == [2, 3] and found["method"] == "bootstrap" and found["num_resamples"] == 10_000
    assert found["a"]["launches"][1]["seconds"] == pytest.approx([1.1, 2.1])
    assert found["differing_settings"] == {"rollout.top_k": ["-1", "5"]}
    text = picture.read_text()
    assert "A: a0, a1, a2" in text and "Seconds of each step" in text and "not scored" in text
    lists = ["--a", *(str(tmp_path / "a" / f"a{i}") for i in range(3)), "--b", str(tmp_path / "b" / "b*"), "--welch"]
    assert cli.main(["compare", *lists]) == 0
    assert "Welch's intervals on the logarithms of launches" in " ".join(capsys.readouterr().out.split())


def test_wrong_arguments_are_refused(tmp_path, capsys):
    run = str(write_run(tmp_path / "a", [*COLD, 1.0, 2.0]))
    assert cli.main(["compare", run]) == 2
    assert "ConfigError: locojax compare compares two sides. Got: " in capsys.readouterr().err
    assert cli.main(["compare", run, run, "--resamples", "0"]) == 2
    assert "Argument --resamples is out of range. Got: 0." in capsys.readouterr().err
    assert cli.main(["compare", run, run, "--plot", str(tmp_path / "x.docx")]) == 2
    assert "x.docx' can't be written: Format 'docx' is not supported" in capsys.readouterr().err
    assert cli.main(["compare", run, str(tmp_path / "none")]) == 2
    assert "ComparisonError: There is no run at" in capsys.readouterr().err
