"""Families of sessions: what is drawn as a whole, and the prefixes that families share."""

from collections import defaultdict

from kvmesh.workload.model import Round, Workload


def families_of(workload: Workload) -> list[list[int]]:
    """Indices of the rounds of each family, in order.

    A family is the sessions that wait for each other or have a common ancestor.
    """
    root = list(range(len(workload.sessions)))

    def find(session: int) -> int:
        while root[session] != session:
            root[session] = root[root[session]]
            session = root[session]
        return session

    for number, session in enumerate(workload.sessions):
        if session.parent is not None:
            root[find(number)] = find(session.parent)
    for round_ in workload.rounds:
        for index in round_.after:
            root[find(round_.session)] = find(workload.rounds[index].session)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index, round_ in enumerate(workload.rounds):
        members[find(round_.session)].append(index)
    return list(members.values())


def family_start(workload: Workload, family: list[int]) -> float:
    """Seconds from the start of the workload to the first request of a family."""
    rounds = (workload.rounds[index] for index in family)
    return min((round_.at_s for round_ in rounds if not round_.after), default=0.0)


def branch_uses(workload: Workload, families: list[list[int]]) -> dict[int, list[tuple[int, int]]]:
    """(token, family) of each family's longest use of each branch, the longest first."""
    uses: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, family in enumerate(families):
        own: dict[int, int] = {}
        for index in family:
            for branch, tokens in prompts_of(workload.rounds[index]):
                for part, _, end in workload.tree.reversed_path(branch, tokens):
                    if own.get(part, -1) >= end:
                        break  # a longer prompt of this family has passed here
                    own[part] = end
        for branch, end in own.items():
            uses[branch].append((end, number))
    for each in uses.values():
        each.sort(reverse=True)
    return uses


def shared_ends(uses: dict[int, list[tuple[int, int]]]) -> dict[int, int]:
    """The token up to which at least two families use each branch; absent if only one does."""
    return {branch: each[1][0] for branch, each in uses.items() if len(each) > 1}


def prompts_of(round_: Round) -> list[tuple[int, int]]:
    """(branch, tokens) of the prompt, of what the engine holds after it, and as rendered."""
    total = round_.input_tokens + round_.output_tokens
    prompts = [(round_.branch, round_.input_tokens), (round_.output_branch, total)]
    return prompts if round_.rendered is None else [*prompts, round_.rendered]
