"""Invented two-hop questions in HotpotQA's form, without end: to train on where no data set is at hand.

People, works and places that do not exist, with attributes drawn at random, so that nothing can be known by heart and every
name has to be read and copied. Nothing of HotpotQA is in here: all of it is left for testing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .questions import Paragraph, Question

__all__ = ["invent"]

_WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
_GIVEN = _WORDS["given names"]
_HEADS = _WORDS["heads of place names"]
_TAILS = _WORDS["tails of place names"]
_COLOURS = _WORDS["words before a thing"]
_THINGS = _WORDS["things"]
_COUNTRIES = _WORDS["nationalities"]
_TRADES = _WORDS["professions"]
_GENRES = _WORDS["film genres"]
_MUSIC = _WORDS["kinds of music"]
_MONTHS = _WORDS["months"]
_GOODS = _WORDS["goods"]
_MIDS = ["", "", "a", "er", "i", "o", "en", "is"]


@dataclass
class _Entity:
    """One thing with a page of its own.

    Attributes:
        kind: what one calls it in a question.
        says: attribute -> (its value, number of the sentence that says so).
        leads: relation -> the other entity that a sentence names.
    """

    title: str
    kind: str
    sentences: list[str]
    says: dict[str, tuple[str, int]]
    leads: dict[str, tuple[_Entity, int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.title.partition(" (")[0]


def invent(count: int, seed: int = 0) -> Iterator[Question]:
    """`count` questions: three in four go over a bridge, the others compare."""
    draw = random.Random(seed)
    for _ in range(count):
        yield _bridge(draw) if draw.random() < 0.75 else _comparison(draw)


# --- the entities --------------------------------------------------------------------------------------------------------


def _place_name(draw: random.Random) -> str:
    return draw.choice(_HEADS) + draw.choice(_MIDS) + draw.choice(_TAILS)


def _person_name(draw: random.Random) -> str:
    middle = f"{draw.choice('ABCDEFGHJKLMNPRSTW')}. " if draw.random() < 0.15 else ""
    return f"{draw.choice(_GIVEN)} {middle}{_place_name(draw)}"


def _work_title(draw: random.Random) -> str:
    forms = (f"The {draw.choice(_COLOURS)} {draw.choice(_THINGS)}", f"{draw.choice(_COLOURS)} {draw.choice(_THINGS)}",
             f"{draw.choice(_THINGS)} of {draw.choice(_THINGS)}s", f"The {draw.choice(_THINGS)} for {draw.choice(_GIVEN)}",
             f"{draw.choice(_THINGS)} and {draw.choice(_THINGS)}")  # fmt: skip
    return draw.choice(forms)


def _person(draw: random.Random, country: str | None = None, trade: str | None = None) -> _Entity:
    name, year, town = _person_name(draw), str(draw.randint(1840, 1960)), _place_name(draw)
    country, trade = country or draw.choice(_COUNTRIES), trade or draw.choice(_TRADES)
    school = f"University of {_place_name(draw)}"
    born = f"{draw.randint(1, 28)} {draw.choice(_MONTHS)} {year}"
    prize = f"the {_place_name(draw)} Prize"
    an = "an" if country[0] in "AEIOU" else "a"
    last = name.split()[-1]
    sentences = [
        draw.choice((f"{name} (born {born}) is {an} {country} {trade}.", f"{name} ({born}) was {an} {country} {trade}.")),
        draw.choice((
            f"{last} was born in {town} and grew up there.",
            f"Born in {town}, {last} was the youngest of {draw.choice(('three', 'four', 'five', 'six'))} children.",
        )),
        draw.choice((
            f"{last} studied at the {school}.",
            f"After school {last} went to the {school} for {draw.choice(('two', 'three', 'four'))} years.",
        )),
        draw.choice((
            f"For this work {last} was given {prize} in {int(year) + draw.randint(30, 60)}.",
            f"{last} won {prize}.",
        )),
    ]  # fmt: skip
    says = {"birth year": (year, 0), "nationality": (country, 0), "profession": (trade, 0), "birthplace": (town, 1),
            "university": (school, 2), "prize": (prize.removeprefix("the "), 3)}  # fmt: skip
    return _Entity(name, "person", sentences, says)


def _city(draw: random.Random) -> _Entity:
    name, river, region = _place_name(draw), f"the {_place_name(draw)} River", f"{_place_name(draw)} County"
    year, people = str(draw.randint(900, 1890)), f"{draw.randint(3, 900)},{draw.randint(100, 999)}"
    sentences = [
        draw.choice((
            f"{name} is a {draw.choice(('city', 'town', 'market town', 'port'))} in {region}.",
            f"{name} is the largest town of {region}.",
        )),
        draw.choice((
            f"It lies on {river}.",
            f"The town stands where {river} meets the sea.",
            f"{river[0].upper()}{river[1:]} runs through it.",
        )),
        draw.choice((f"At the last census it had {people} inhabitants.", f"Its population is {people}.")),
        draw.choice((f"It was founded in {year}.", f"The first record of it is from {year}.")),
    ]  # fmt: skip
    says = {
        "river": (river.removeprefix("the "), 1),
        "county": (region, 0),
        "population": (people, 2),
        "founding": (year, 3),
    }
    return _Entity(name, "city", sentences, says)


def _bracketed(draw: random.Random, title: str, kind: str) -> str:
    return f"{title} ({kind})" if draw.random() < 0.4 else title


def _film(draw: random.Random) -> _Entity:
    by, star, year, genre = _person(draw), _person_name(draw), draw.randint(1925, 2016), draw.choice(_GENRES)
    title = _work_title(draw)
    more = [
        f"It stars {star} and {_person_name(draw)}.",
        f"It was filmed in {_place_name(draw)} and {_place_name(draw)}.",
    ]
    country = "American" if draw.random() < 0.4 else draw.choice(("British", "French", "German", "Polish"))
    full = _bracketed(draw, title, "film")
    opening = draw.choice((
        f"{title} is {'an' if country == 'American' else 'a'} {country} {genre} film of {year}, directed by {by.name}.",
        f"{title} is a {year} {country} {genre} film directed by {by.name}.",
    ))  # fmt: skip
    return _Entity(full, "film", [opening, *more], {"year": (str(year), 0)}, {"director": (by, 0)})


def _book(draw: random.Random) -> _Entity:
    by, year, title = _person(draw), draw.randint(1880, 2015), _work_title(draw)
    more = [f"It tells of a {draw.choice(_TRADES)} who returns to {_place_name(draw)}."]
    more.append(f"It sold {draw.randint(2, 90)},000 copies.")
    full = _bracketed(draw, title, "novel")
    opening = draw.choice((
        f"{title} is a novel by {by.name}, published in {year}.",
        f"{title} is a {year} novel written by {by.name}.",
    ))  # fmt: skip
    return _Entity(full, "novel", [opening, *more], {"year": (str(year), 0)}, {"author": (by, 0)})


def _album(draw: random.Random) -> _Entity:
    by, year, title = _band(draw), draw.randint(1960, 2016), _work_title(draw)
    more = [f"It was recorded in {_place_name(draw)}.", f'The single "{_work_title(draw)}" was taken from it.']
    full = _bracketed(draw, title, "album")
    opening = draw.choice((
        f"{title} is the {draw.choice(('first', 'second', 'third', 'fourth'))} album by {by.name}, released in {year}.",
        f"{title} is an album of {year} by the {draw.choice(_MUSIC)} band {by.name}.",
    ))  # fmt: skip
    return _Entity(full, "album", [opening, *more], {"year": (str(year), 0)}, {"band": (by, 0)})


def _band(draw: random.Random) -> _Entity:
    name, singer = f"{draw.choice(_COLOURS)} {draw.choice(_THINGS)}s", _person(draw)
    year, town, kind = str(draw.randint(1955, 2012)), _place_name(draw), draw.choice(_MUSIC)
    sentences = [f"{name} are a {kind} band from {town}, formed in {year}.", f"The singer of the band is {singer.name}.",
                 f"They have toured with {draw.choice(_THINGS)} {draw.choice(_THINGS)}."]  # fmt: skip
    says = {"founding": (year, 0), "home town": (town, 0), "genre": (kind, 0)}
    return _Entity(name, "band", sentences, says, {"singer": (singer, 1)})


def _company(draw: random.Random) -> _Entity:
    founder, seat, year, goods = _person(draw), _city(draw), draw.randint(1850, 2010), draw.choice(_GOODS)
    name = f"{_place_name(draw)} {draw.choice(('Works', 'Industries', 'Group', 'and Sons', 'Company'))}"
    sentences = [f"{name} is a company that makes {goods}.", f"It was founded in {year} by {founder.name}.",
                 f"Its head office is in {seat.name}."]  # fmt: skip
    return _Entity(name, "company", sentences, {"year": (str(year), 1), "product": (goods, 0)},
                   {"founder": (founder, 1), "seat": (seat, 2)})  # fmt: skip


def _building(draw: random.Random) -> _Entity:
    by, town, year = _person(draw), _city(draw), draw.randint(1780, 2012)
    name = f"{_place_name(draw)} {draw.choice(('Hall', 'Tower', 'Library', 'Theatre', 'Museum', 'Bridge', 'Stadium'))}"
    sentences = [draw.choice((f"{name} is a listed building in {town.name}.", f"{name} stands in {town.name}.")),
                 draw.choice((f"It was designed by {by.name} and opened in {year}.",
                              f"Its architect was {by.name}, and it was finished in {year}.")),
                 f"It was restored after a fire in {year + draw.randint(2, 60)}."]  # fmt: skip
    return _Entity(name, "building", sentences, {"year": (str(year), 1)}, {"architect": (by, 1), "site": (town, 0)})


def _club(draw: random.Random) -> _Entity:
    town, year = _city(draw), draw.randint(1870, 1990)
    sport = draw.choice(("football", "rugby", "hockey", "basketball", "cricket"))
    name = f"{_place_name(draw)} {draw.choice(('Rovers', 'United', 'Athletic', 'Wanderers', 'Rangers'))}"
    colours = f"{draw.choice(_COLOURS).lower()} and {draw.choice(('black', 'white', 'yellow'))}"
    sentences = [f"{name} is a {sport} club from {town.name}.", f"The club was founded in {year}.",
                 f"Its colours are {colours}."]  # fmt: skip
    return _Entity(name, f"{sport} club", sentences, {"year": (str(year), 1)}, {"town": (town, 0)})


# --- the questions -------------------------------------------------------------------------------------------------------

_MAKERS = (_film, _book, _album, _company, _building, _club)
_ALL = (_person, _city, _band, *_MAKERS)
_THE_OTHER = {
    "director": ("the director of {}", "the person who directed {}", "the {} director"),
    "author": ("the author of {}", "the writer of the novel {}"),
    "band": ("the band that recorded {}", "the group behind the album {}"),
    "founder": ("the founder of {}", "the person who founded {}"),
    "seat": ("the town where {} has its head office", "the seat of {}"),
    "architect": ("the architect of {}", "the person who designed {}"),
    "site": ("the town where {} stands", "the place in which {} was built"),
    "town": ("the home town of {}", "the town that {} comes from"),
    "singer": ("the singer of {}",),
}
_ASK = {
    "birth year": ("In which year was {} born?", "When was {} born?"),
    "nationality": ("What nationality does {} have?", "Of what nationality is {}?"),
    "profession": ("What is the profession of {}?", "What does {} do for a living?"),
    "birthplace": ("Where was {} born?", "In which town was {} born?", "{} was born in what town?"),
    "university": ("Which university did {} attend?", "Where did {} study?"),
    "prize": ("Which prize was given to {}?", "What award did {} win?"),
    "river": ("On which river lies {}?", "Which river runs through {}?"),
    "county": ("In which county is {}?", "{} is in what county?"),
    "population": ("How many people live in {}?", "What is the population of {}?"),
    "founding": ("When did {} begin?", "In which year was the beginning of {}?"),
    "home town": ("Where does {} come from?", "From which town is {}?"),
    "genre": ("What kind of music does {} play?", "{} plays which genre of music?"),
}


def _bridge(draw: random.Random) -> Question:
    first = draw.choice((*_MAKERS, _band))(draw)
    relation = draw.choice(sorted(first.leads))
    second, at = first.leads[relation]
    asked = draw.choice(sorted(second.says))
    answer, number = second.says[asked]
    other = draw.choice(_THE_OTHER[relation]).format(first.name)
    question = draw.choice(_ASK[asked]).format(other)
    return _question(draw, question[0].upper() + question[1:], answer, [(first, at), (second, number)], "bridge")


def _comparison(draw: random.Random) -> Question:
    make, asked, ask = draw.choice((
        (_person, "birth year", "Who was born first, {} or {}?"),
        (_film, "year", "Which film came out first, {} or {}?"),
        (_book, "year", "Which novel was published first, {} or {}?"),
        (_person, "nationality", "Are {} and {} of the same nationality?"),
        (_person, "profession", "Do {} and {} have the same profession?"),
    ))  # fmt: skip
    one, two = make(draw), make(draw)
    mine, number = one.says[asked]
    if not asked.endswith("year") and draw.random() < 0.5:  # as often yes as no
        two = _person(draw, country=mine) if asked == "nationality" else _person(draw, trade=mine)
    theirs = two.says[asked][0]
    if asked.endswith("year"):
        if mine == theirs:
            return _comparison(draw)
        answer = one.name if int(mine) < int(theirs) else two.name
    else:
        answer = "yes" if mine == theirs else "no"
    return _question(
        draw, ask.format(one.name, two.name), answer, [(one, number), (two, two.says[asked][1])], "comparison"
    )


def _question(draw: random.Random, question: str, answer: str, facts: list[tuple[_Entity, int]], kind: str) -> Question:
    pages = [entity for entity, _ in facts] + [draw.choice(_ALL)(draw) for _ in range(8)]
    draw.shuffle(pages)
    context = tuple(Paragraph(page.title, tuple(page.sentences)) for page in pages)
    return Question(
        question, answer, context, tuple((entity.title, number) for entity, number in facts), "invented", kind
    )
