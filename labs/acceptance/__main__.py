"""python -m labs.acceptance: each rule on each drafted shape, every outcome enumerated."""

from labs.acceptance import (
    DRAFT,
    SHAPES,
    TARGET,
    TextModel,
    beam_candidates,
    in_floats,
    largest_fault,
    law,
    longest_of_tosses,
    mean_length,
    most_tokens,
    rules_for,
    step_law,
)


def table() -> str:
    """A row for each shape and rule: whether it is lossless, and its mean tokens of a step."""
    target, draft = TextModel(1), TextModel(2)
    lines = [f"{'drafted':<24}{'rule':<16}{'lossless':<18}tokens a step"]
    for shape, widths, replacement in SHAPES:
        for name, rule in rules_for(widths, replacement).items():
            exact = name != "k-sequential"  # its rho is found by halving intervals
            models = (target, draft) if exact else (in_floats(target), in_floats(draft))
            found = step_law(rule, *models, widths, replacement)
            fault = largest_fault(found, models[0])  # 0, where numbers are exact
            lossless = (
                "in fractions" if exact and fault == 0 else "in floats" if fault < 1e-12 else "no"
            )
            lines.append(f"{shape:<24}{name:<16}{lossless:<18}{float(mean_length(found)):.4f}")
        _, bound = most_tokens(target, draft, widths, replacement)
        lines.append(f"{shape:<24}{'(any rule)':<16}{'':<18}{float(bound):.4f} at most")
    return "\n".join(lines)


def beam_table() -> str:
    """The first token's distribution if a beam's two candidates are accepted as if drawn."""
    beam = beam_candidates(lambda path: DRAFT, 2, 1)

    def step(rng):
        return longest_of_tosses(beam, lambda path: TARGET, lambda path: DRAFT, rng)[0]

    found = law(step)
    rows = [("target", TARGET), ("beam of two", [found.get(x, 0) for x in range(3)])]
    return "\n".join(f"{name:<12}" + "  ".join(f"{x!s:>5}" for x in p) for name, p in rows)


if __name__ == "__main__":
    print(table())
    print("\nThe likeliest candidates of a beam, accepted as if they had been drawn:")
    print(beam_table())
