"""The agents of examples/: questions, tools, trajectories that a program writes, and the loop that agents go round."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from tiny_agents import END, save_tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from agents import (
    AGENTS,
    CUES,
    Crew,
    Paragraph,
    Question,
    Toolbox,
    Turn,
    encode,
    exact_match,
    f1,
    held_out,
    load_questions,
    new_agents,
    opening,
    score,
    turn_ends,
    write_trajectory,
)  # fmt: skip
from agents.lessons import lessons_of, trajectories_of
from agents.questions import question_from
from agents.tools import tool_named
from lragent_hf import LoRASharedCache

HOTPOT = {
    "question": "Where was the director of Wings born?", "answer": "Oslo", "level": "easy", "type": "bridge",
    "context": [["Wings (film)", ["Wings is a film.", " It was directed by Ada Berg."]],
                ["Ada Berg", ["Ada Berg is a director.", "She has two sisters.", "She lives in Rome.", "She likes Rome.",
                              "She was born in Oslo, as her father was."]],
                ["Wing", ["A wing is a limb."]]],
    "supporting_facts": [["Ada Berg", 4], ["Wings (film)", 1]],
}  # fmt: skip
QUESTION = question_from(HOTPOT)


# --- questions -----------------------------------------------------------------------------------------------------------


def test_both_forms_of_hotpotqa_are_the_same_question(tmp_path: Path) -> None:
    titles, sentences = zip(*HOTPOT["context"], strict=True)
    facts = zip(*HOTPOT["supporting_facts"], strict=True)
    hub = {**HOTPOT, "context": {"title": titles, "sentences": sentences},
           "supporting_facts": dict(zip(("title", "sent_id"), facts, strict=True))}  # fmt: skip
    assert question_from(hub) == QUESTION
    assert QUESTION.context[0] == Paragraph("Wings (film)", ("Wings is a film.", "It was directed by Ada Berg."))
    (tmp_path / "q.jsonl").write_text(f"{json.dumps(HOTPOT)}\n\n{json.dumps(hub)}\n")
    (tmp_path / "q.json").write_text(json.dumps([HOTPOT, hub], indent=1))
    assert load_questions(str(tmp_path / "q.jsonl")) == load_questions(str(tmp_path / "q.json")) == [QUESTION, QUESTION]
    assert load_questions(str(tmp_path / "q.json"), limit=1) == [QUESTION]


def test_both_forms_of_scienceqa_are_the_same_question() -> None:
    file = {"Question": "What is hot?\nOptions: (A) ice (B) fire", "choices": ["ice", "fire"], "Answer": "B",
            "caption": "A fire. It burns.", "metadata": {"grade": 4, "topic": "physics"}}  # fmt: skip
    hub = {"question": "What is hot?", "choices": ["ice", "fire"], "answer": 1, "hint": "Fire burns.", "lecture": "",
           "grade": "4", "topic": "physics"}  # fmt: skip
    one, other = question_from(file), question_from(hub)
    assert one.question == other.question == "What is hot? (A) ice (B) fire"
    for question in (one, other):
        assert (question.answer, question.level, question.kind) == ("B", "1-4", "physics")
        assert question.choices == ("ice", "fire")
    assert one.context == (Paragraph("Picture", ("A fire.", "It burns.")),)
    assert other.context == (Paragraph("Hint", ("Fire burns.",)),)
    right, wrong = ("B", "(B) fire", "Fire.", "I choose (B)", "B.", "A fire"), ("A", "ice", "I do not know", "", None)
    assert [score(answer, one) for answer in right + wrong] == [(1, 1)] * 6 + [(0, 0)] * 5


def test_an_empty_sentence_keeps_its_number() -> None:
    page = ["Wings (film)", ["", " Wings is a film.", "", "It was directed by Ada Berg."]]
    question = question_from({**HOTPOT, "context": [page, *HOTPOT["context"][1:]],
                              "supporting_facts": [["Wings (film)", 3], ["Ada Berg", 4]]})  # fmt: skip
    title, number = question.facts[0]
    assert question.context[0].sentences[number] == "It was directed by Ada Berg."
    assert Toolbox(question).retrieve(title) == "[Wings (film)] Wings is a film."


def test_questions_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((path, config, split))
        return [{**HOTPOT, "image": None}, {**HOTPOT, "image": object()}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_questions("hotpotqa:train") == load_questions("hotpotqa") == [QUESTION]
    load_questions("scienceqa")
    assert asked == [("hotpotqa/hotpot_qa", "distractor", "train"), ("hotpotqa/hotpot_qa", "distractor", "validation"),
                     ("derek-thomas/ScienceQA", None, "test")]  # fmt: skip


def test_what_is_no_question_is_refused_by_its_fields(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks \['answer'\]"):
        question_from({"question": "?", "context": []})
    with pytest.raises(ValueError, match="neither HotpotQA's fields"):
        question_from({"prompt": "?"})
    (tmp_path / "bad.jsonl").write_text(f'{json.dumps(HOTPOT)}\n{{"question": ')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: "):
        load_questions(str(tmp_path / "bad.jsonl"))
    with pytest.raises(FileNotFoundError, match="No questions at"):
        load_questions(str(tmp_path / "none.jsonl"))


def test_questions_are_held_out_by_their_words_alone() -> None:
    questions = load_questions("worlds", limit=400)
    out = [held_out(question, 0.25) for question in questions]
    assert 60 < sum(out) < 140
    assert out == [held_out(Question(f" {one.question.upper()}", "", ()), 0.25) for one in questions]
    assert not any(held_out(one, 0.0) for one in questions)
    assert all(held_out(one, 1.0) for one in questions)


# --- tools and scores ----------------------------------------------------------------------------------------------------


def test_retrieve_takes_a_title_or_one_close_to_it_and_lookup_reads_on() -> None:
    box = Toolbox(QUESTION)
    assert box.lookup("born") == "No page is open: Retrieve one first."
    shown = "[Wings (film)] Wings is a film. It was directed by Ada Berg."
    assert [box.retrieve(title) for title in ("Wings (film)", "wings", '"Wings".')] == [shown] * 3
    page = "[Ada Berg] Ada Berg is a director. She has two sisters. She lives in Rome."
    assert [box.retrieve(title) for title in ("Ada Berg", "Ada Burg", "ada berg")] == [page] * 3
    assert box.lookup("ROME") == "[Ada Berg] She likes Rome."  # the sentence before was shown
    assert box.lookup("born").endswith("She was born in Oslo, as her father was.")
    assert box.lookup("born") == "Nothing more about 'born' in Ada Berg."
    lost = box.retrieve("Zanzibar")
    assert lost.startswith("There is nothing about 'Zanzibar'. Titles there are: ")
    assert box.lookup("Oslo").startswith("Nothing more")  # the page stays open
    assert box.retrieve("").startswith("There is nothing about ''")
    assert Toolbox(Question("?", "", ())).retrieve("x") == "There is nothing."
    named = [tool_named(text) for text in ("Retrieve", " lookup[x]", "FINISH", "I reflect", "Search", "")]
    assert named == ["Retrieve", "Lookup", "Finish", "Reflect", None, None]


def test_answers_are_scored_as_hotpotqa_scores_them() -> None:
    assert exact_match("The  Eiffel tower.", "eiffel Tower") == 1
    assert exact_match("Eiffel", "Eiffel Tower") == 0
    assert f1("the big tower of Eiffel", "Eiffel tower") == pytest.approx(2 * 2 / (4 + 2))
    assert f1("tower tower", "tower") == pytest.approx(2 / 3)
    assert [f1("yes", "yes"), f1("yes it is", "yes"), f1("no", "noanswer"), f1("x", "y")] == [1, 0, 0, 0]
    assert score(None, QUESTION) == (0, 0)


def test_a_title_opens_its_own_page_and_no_other() -> None:
    pages = (Paragraph("Wings", ("A wing is a limb.",)), Paragraph("Wings (film)", ("Wings is a film.",)))
    for context in (pages, pages[::-1]):
        box = Toolbox(Question("?", "", context))
        assert box.retrieve("wings") == "[Wings] A wing is a limb."
        assert box.retrieve("Wings (film)") == "[Wings (film)] Wings is a film."
    both = replace(QUESTION, context=(*QUESTION.context, pages[0]))
    pieces = write_trajectory(both, random.Random(0), wrong_turns=0)
    assert pieces is None or "Input: Wings (film)\n" in "".join(piece.text for piece in pieces)


# --- trajectories --------------------------------------------------------------------------------------------------------


def test_a_program_finds_its_way_and_reads_on_where_it_must() -> None:
    pieces = write_trajectory(QUESTION, random.Random(0), wrong_turns=0)
    assert pieces is not None
    text = "".join(piece.text for piece in pieces)
    order = [
        "Question: Where", "Input: Wings\n", "Found: [Wings (film)]", "Input: Ada Berg\n", "Tool: Lookup\nInput: born\n",
        "Found: [Ada Berg] She was born in Oslo", "Reflection: It was directed by Ada Berg. She was born in Oslo",
        "So the answer is Oslo.\n", "Tool: Finish\nInput: Oslo\n",
    ]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert text.endswith(order[-1])
    assert {piece.agent for piece in pieces} == {None, *AGENTS}


def test_a_program_gives_up_where_nothing_leads_on() -> None:
    nowhere = replace(QUESTION, question="Where was that person born?")
    assert write_trajectory(nowhere, random.Random(0)) is None
    assert write_trajectory(replace(QUESTION, facts=(("Nobody", 0),)), random.Random(0)) is None
    assert write_trajectory(replace(QUESTION, facts=()), random.Random(0)) is None
    with pytest.raises(ValueError, match="None of these questions"):
        next(trajectories_of([nowhere]))


def test_wrong_turns_are_read_and_not_learnt() -> None:
    pieces = write_trajectory(QUESTION, random.Random(1), wrong_turns=1)
    assert pieces is not None
    bad = [piece for piece in pieces if not piece.good]
    assert [piece.agent for piece in bad] == ["plan", "act"]
    after = pieces[pieces.index(bad[1]) + 1 :]
    assert after[0].text.startswith("Found: [")
    assert next(piece.text for piece in after if piece.agent == "reflect").startswith(
        (" Wing has nothing", " Wings has")
    )
    lessons = lessons_of(pieces, tiny_tokenizer())
    learnt = {agent: bytes_of(lesson.ids[0, lesson.at + 1]) for agent, lesson in lessons.items()}
    assert learnt == {a: "".join(p.text for p in pieces if p.agent == a and p.good) for a in AGENTS}
    for lesson in lessons.values():
        assert lesson.ids.shape[1] == lesson.at[-1] + 2  # nothing is read after the last token that is learnt


def bytes_of(ids: torch.Tensor) -> str:
    return str(tiny_tokenizer().decode(ids))


@given(st.integers(0, 10**6))
def test_invented_questions_can_be_answered_from_their_facts(seed: int) -> None:
    (question,) = load_questions("worlds", limit=1, seed=seed)
    pages = {page.title: page for page in question.context}
    assert len(question.context) == 10
    facts = " ".join(pages[title].sentences[number] for title, number in question.facts)
    assert question.answer in ("yes", "no") or question.answer in facts
    pieces = write_trajectory(question, random.Random(seed))
    assert pieces is None or pieces[-1].text == f" {question.answer}\n"


def test_nine_invented_questions_in_ten_have_a_trajectory() -> None:
    told = [write_trajectory(one, random.Random(0)) for one in load_questions("worlds", limit=300)]
    assert sum(pieces is not None for pieces in told) > 270
    answers = [one.answer for one in load_questions("worlds", limit=2000) if one.answer in ("yes", "no")]
    assert 0.35 < answers.count("yes") / len(answers) < 0.65


# --- the loop ------------------------------------------------------------------------------------------------------------


class ScriptedCrew(Crew):
    """Agents that write what they are told."""

    def __init__(self, script: list[tuple[str, str]]) -> None:
        self.script, self.tokenizer = iter(script), tiny_tokenizer()
        self.model: Any = torch.nn.Module()
        self.model.device = torch.device("cpu")
        self._special, self._stop = {self.tokenizer.eos_token_id}, encode(self.tokenizer, "\n")

    def take_turn(self, cache: Any, agent: str, prompt: torch.Tensor, limit: int = 64, forced: Any = None) -> Turn:
        who, text = next(self.script)
        assert who == agent
        return Turn(agent, prompt, encode(self.tokenizer, text), None, 0, 0.0, 0.0)


@given(st.integers(0, 10**6))
def test_what_is_trained_on_and_what_is_generated_are_the_same_tokens(seed: int) -> None:
    """Agents that write what a program has written for them go through the very tokens of the lesson."""
    (question,) = load_questions("worlds", limit=1, seed=seed)
    pieces = write_trajectory(question, random.Random(seed))
    if pieces is None:
        return
    crew = ScriptedCrew([(piece.agent, piece.text) for piece in pieces if piece.agent])
    episode = crew.answer(question, None)
    tokenizer = tiny_tokenizer()
    assert torch.equal(episode.ids, torch.cat([encode(tokenizer, piece.text) for piece in pieces], dim=1))
    assert episode.text == "".join(piece.text for piece in pieces)
    assert exact_match(episode.answer or "", question.answer) == 1


def test_a_line_break_in_place_of_the_models_end_is_not_the_agents() -> None:
    crew = ScriptedCrew([("plan", f" hm{END}"), ("plan", " Reflect\n"), ("reflect", " so\n")])
    episode = crew.answer(QUESTION, None, max_turns=3)
    trajectory = episode.trajectory
    assert trajectory.written is not None
    assert bytes_of(trajectory.input_ids[trajectory.written]) == " hm Reflect\n so\n"
    assert "Thought: hm\nTool: Reflect\nReflection: so\n" in episode.text


def test_turns_run_out_and_no_tool_is_no_end() -> None:
    crew = ScriptedCrew([("plan", " hm\n"), ("plan", " Google\n"), ("plan", " cut short"), ("plan", f" Finish{END}")])
    episode = crew.answer(QUESTION, None, max_turns=4)
    assert episode.answer is None
    assert len(episode.turns) == 4
    told = "Found: there is no such tool. Tools: Retrieve, Lookup, Reflect, Finish.\n"
    assert (
        episode.text == f"{opening(QUESTION).text}Thought: hm\nTool: Google\n{told}Thought: cut short\nTool: Finish\n"
    )


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model: PeftModel = new_agents(AutoModelForCausalLM.from_pretrained(folder), ["q_proj", "v_proj"], rank=4)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return Crew(model.eval(), AutoTokenizer.from_pretrained(folder), new_tokens=6, keep_logits=True)


@pytest.mark.parametrize("scheme", ["base_shared", "base_lr_stacked"])
def test_a_crew_goes_round_on_one_cache_and_can_be_replayed(crew: Crew, scheme: str) -> None:
    cache = LoRASharedCache(crew.model, scheme=scheme)
    episode = crew.answer(QUESTION, cache, max_turns=5)
    assert [turn.agent for turn in episode.turns[:2]] == ["plan", "plan"]
    assert len(episode.turns) == 5
    assert bytes_of(episode.ids[0]) == episode.text
    again = LoRASharedCache(crew.model, scheme=scheme)
    for turn in episode.turns:
        same = crew.take_turn(again, turn.agent, turn.prompt, forced=turn.written)
        assert torch.equal(same.written, turn.written)
        assert same.logits is not None
        assert turn.logits is not None
        torch.testing.assert_close(same.logits, turn.logits)
        assert (same.prefilled, same.reused) == (turn.prefilled, turn.reused)
    trajectory = episode.trajectory
    starts = [turn.prompt.shape[1] for turn in episode.turns]
    own = [(start, stop) for start, (_, stop) in zip(starts, trajectory.turns, strict=True)]
    assert trajectory.written is not None
    assert int(trajectory.written.sum()) == sum(stop - start for start, stop in own)
    for turn, (start, stop) in zip(episode.turns, own, strict=True):
        assert torch.equal(trajectory.input_ids[start:stop], turn.written[0])
        assert trajectory.written[start:stop].all()
    first, second = episode.turns[:2]
    assert (first.reused, first.prefilled) == (0, first.prompt.shape[1])
    assert second.reused == first.prompt.shape[1] + first.written.shape[1] - 1


def test_a_turn_ends_with_any_token_that_holds_a_line_break() -> None:
    tokenizer = tiny_tokenizer()
    assert turn_ends(tokenizer, [3]) == sorted({3, *encode(tokenizer, "\n")[0].tolist()})
    assert all(cue.endswith(":") for cue in CUES.values())


def test_a_token_that_begins_a_text_comes_first_in_both() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    begin = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", begin)])
    pieces = write_trajectory(QUESTION, random.Random(0), wrong_turns=0)
    assert pieces is not None
    lesson = lessons_of(pieces, tokenizer)["act"]
    crew = ScriptedCrew([(piece.agent, piece.text) for piece in pieces if piece.agent])
    crew.tokenizer = tokenizer
    ids = crew.answer(QUESTION, None).ids
    assert ids[0, 0] == begin
    assert (ids == begin).sum() == 1
    assert torch.equal(ids, lesson.ids)
    assert bytes_of(ids[0, lesson.at + 1]) == "".join(piece.text for piece in pieces if piece.agent == "act")
