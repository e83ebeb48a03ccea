"""Three LoRA agents that answer questions: the loop they go round, their tools, and trajectories to train them on."""

from .adapters import add_agents, load_agents, new_agents
from .episode import Crew, Episode, Turn
from .oracle import write_trajectory
from .questions import Paragraph, Question, held_out, load_questions
from .scoring import exact_match, f1, score
from .script import AGENTS, CUES, Piece, encode, opening, turn_ends
from .tools import TOOLS, Toolbox

__all__ = [
    "AGENTS",
    "CUES",
    "TOOLS",
    "Crew",
    "Episode",
    "Paragraph",
    "Piece",
    "Question",
    "Toolbox",
    "Turn",
    "add_agents",
    "encode",
    "exact_match",
    "f1",
    "held_out",
    "load_agents",
    "load_questions",
    "new_agents",
    "opening",
    "score",
    "turn_ends",
    "write_trajectory",
]
